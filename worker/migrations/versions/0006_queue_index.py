"""The queue in one index, tenant by tenant and the oldest first: places in it were found by sorting its rows."""

from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.create_index("ix_jobs_queue", "jobs", ["state", "tenant", "queued_at", "id"])
    op.drop_index("ix_jobs_state_tenant", "jobs")


def downgrade() -> None:
    op.create_index("ix_jobs_state_tenant", "jobs", ["state", "tenant"])
    op.drop_index("ix_jobs_queue", "jobs")
