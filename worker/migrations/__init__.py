"""Alembic migrations of the job store; run by worker.database on every start, under a lock."""
