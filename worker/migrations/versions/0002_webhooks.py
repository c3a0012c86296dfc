"""Secrets and deliveries of webhooks."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_PENDING = sa.text("state = 'pending'")


def upgrade() -> None:
    op.create_table("webhook_secrets", _job_id(), sa.Column("ciphertext", sa.Text(), nullable=False))
    op.create_table(
        "webhook_deliveries",
        _job_id(),
        sa.Column("sequence", sa.Integer(), primary_key=True),
        sa.Column("tenant", sa.String(200), nullable=False),
        sa.Column("type", sa.String(20), nullable=False),
        sa.Column("payload", sa.Text(), nullable=False),
        sa.Column("state", sa.String(20), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("next_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("log", sa.JSON(), nullable=False),
    )
    op.create_index(
        "ix_webhook_deliveries_due",
        "webhook_deliveries",
        ["next_at"],
        sqlite_where=_PENDING,
        postgresql_where=_PENDING,
    )


def downgrade() -> None:
    op.drop_table("webhook_deliveries")
    op.drop_table("webhook_secrets")


def _job_id() -> sa.Column[str]:
    return sa.Column("job_id", sa.String(40), sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
