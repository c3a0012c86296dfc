"""An index for a tenant's jobs in one state, newest first: a rare state was looked for among all of a tenant's jobs."""

from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.create_index("ix_jobs_tenant_state_id", "jobs", ["tenant", "state", "id"])


def downgrade() -> None:
    op.drop_index("ix_jobs_tenant_state_id", "jobs")
