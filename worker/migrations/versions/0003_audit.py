"""The log of who did what, and indexes by which old jobs and their keys are found."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

_ENDED = sa.text("state IN ('succeeded', 'failed', 'canceled')")


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("tenant", sa.String(200)),
        sa.Column("action", sa.String(20), nullable=False),
        sa.Column("outcome", sa.String(60), nullable=False),
        sa.Column("job_id", sa.String(64)),
        sa.Column("request_id", sa.String(128), nullable=False),
        sa.Column("address", sa.String(64), nullable=False),
    )
    op.create_index("ix_audit_tenant_id", "audit", ["tenant", "id"])
    op.create_index("ix_audit_at", "audit", ["at"])
    op.create_index("ix_jobs_ended_updated_at", "jobs", ["updated_at"], sqlite_where=_ENDED, postgresql_where=_ENDED)
    op.create_index("ix_idempotency_keys_job_id", "idempotency_keys", ["job_id"])


def downgrade() -> None:
    op.drop_index("ix_idempotency_keys_job_id", "idempotency_keys")
    op.drop_index("ix_jobs_ended_updated_at", "jobs")
    op.drop_table("audit")
