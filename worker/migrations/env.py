"""Runs migrations on the connection that worker.database hands over; must not open one of its own."""

from alembic import context

from worker.schema import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    transactional_ddl=True,  # on SQLite too: the caller has begun a transaction that holds the write lock
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
