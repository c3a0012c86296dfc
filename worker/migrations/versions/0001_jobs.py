"""The first tables of the job store."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_ALIVE = sa.text("state IN ('queued', 'running', 'cancelling')")


def upgrade() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(40), primary_key=True),
        sa.Column("tenant", sa.String(200), nullable=False),
        sa.Column("state", sa.String(20), nullable=False),
        sa.Column("config", sa.JSON(), nullable=False),
        sa.Column("identity", sa.String(64), nullable=False),
        sa.Column("source_commit", sa.String(200), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("queued_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("claimed_at", sa.DateTime(timezone=True)),
        sa.Column("stage", sa.String(20)),
        sa.Column("done", sa.BigInteger(), nullable=False),
        sa.Column("total", sa.BigInteger(), nullable=False),
        sa.Column("unit", sa.String(60), nullable=False),
        sa.Column("stage_seconds", sa.JSON(), nullable=False),
        sa.Column("timestamps", sa.JSON(), nullable=False),
        sa.Column("error", sa.JSON()),
        sa.Column("result", sa.JSON()),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("losses", sa.Integer(), nullable=False),
        sa.Column("fencing", sa.Integer(), nullable=False),
        sa.Column("lease_owner", sa.String(200)),
        sa.Column("lease_expires_at", sa.DateTime(timezone=True)),
        sa.Column("last_event", sa.Integer(), nullable=False),
        sa.Column("log_events", sa.Integer(), nullable=False),
        sa.Column("target_begun", sa.Boolean(), nullable=False),
    )
    op.create_index("ix_jobs_state_tenant", "jobs", ["state", "tenant"])
    op.create_index("ix_jobs_tenant_id", "jobs", ["tenant", "id"])
    op.create_index("ix_jobs_tenant_claimed_at", "jobs", ["tenant", "claimed_at"])
    op.create_index(
        "uq_jobs_one_alive", "jobs", ["identity"], unique=True, sqlite_where=_ALIVE, postgresql_where=_ALIVE
    )
    op.create_table(
        "job_labels",
        _job_id(),
        sa.Column("key", sa.String(64), primary_key=True),
        sa.Column("value", sa.String(200), nullable=False),
    )
    op.create_index("ix_job_labels_key_value", "job_labels", ["key", "value"])
    op.create_table(
        "job_events",
        _job_id(),
        sa.Column("sequence", sa.Integer(), primary_key=True),
        sa.Column("kind", sa.String(20), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
    )
    op.create_table("job_tokens", _job_id(), sa.Column("ciphertext", sa.Text(), nullable=False))
    op.create_table(
        "report_files",
        _job_id(),
        sa.Column("name", sa.String(200), primary_key=True),
        sa.Column("content", sa.LargeBinary(), nullable=False),
    )
    op.create_table(
        "idempotency_keys",
        sa.Column("tenant", sa.String(200), primary_key=True),
        sa.Column("key", sa.String(200), primary_key=True),
        sa.Column("body_hash", sa.String(64), nullable=False),
        _job_id(primary_key=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
    )
    op.create_index("ix_idempotency_keys_created_at", "idempotency_keys", ["created_at"])
    op.create_table(
        "workers",
        sa.Column("name", sa.String(200), primary_key=True),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=False),
    )


def downgrade() -> None:
    for table in ("workers", "idempotency_keys", "report_files", "job_tokens", "job_events", "job_labels"):
        op.drop_table(table)
    op.drop_table("jobs")


def _job_id(*, primary_key: bool = True) -> sa.Column[str]:
    return sa.Column(
        "job_id",
        sa.String(40),
        sa.ForeignKey("jobs.id", ondelete="CASCADE"),
        primary_key=primary_key,
        nullable=False,
    )
