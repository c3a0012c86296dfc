"""Which request queued a job; counters for those who operate the service."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("request_id", sa.String(128), nullable=False, server_default=""))
    op.add_column("jobs", sa.Column("traceparent", sa.String(64), nullable=False, server_default=""))
    op.create_table(
        "counters",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("label", sa.String(64), primary_key=True),
        sa.Column("value", sa.Double(), nullable=False),
    )


def downgrade() -> None:
    op.drop_table("counters")
    op.drop_column("jobs", "traceparent")
    op.drop_column("jobs", "request_id")
