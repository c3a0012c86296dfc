"""The order of the queue, as SQL: fair among tenants, first come first served within one. Changes nothing.

A tenant's k-th waiting job has its turn once the tenant runs k jobs more than now. So the next job is the
oldest one of the tenant with the fewest running; among equals the tenant comes first that was last served
longest ago. A tenant with a thousand jobs delays another one's first job by one job, not a thousand.
"""

from sqlalchemy import Subquery, func, select
from sqlalchemy.orm import aliased

from worker.schema import LEASED, JobRow


def queue_order() -> Subquery:
    """Queued jobs, one row each.

    turn   how many jobs its tenant will be running once it is claimed
    place  1 = next
    """
    running, served = _running_per_tenant(), _last_served_per_tenant()
    position = func.row_number().over(partition_by=JobRow.tenant, order_by=(JobRow.queued_at, JobRow.id))
    waiting = (
        select(
            JobRow.id,
            JobRow.queued_at,
            served.c.served_at,
            (func.coalesce(running.c.running, 0) + position).label("turn"),
        )
        .join(served, served.c.tenant == JobRow.tenant)
        .outerjoin(running, running.c.tenant == JobRow.tenant)
        .where(JobRow.state == "queued")
        .subquery()
    )
    order = (waiting.c.turn, waiting.c.served_at.asc().nulls_first(), waiting.c.queued_at, waiting.c.id)
    place = func.row_number().over(order_by=order)
    return select(waiting.c.id, waiting.c.turn, place.label("place")).subquery()


def _running_per_tenant() -> Subquery:
    running = func.count().label("running")
    return select(JobRow.tenant, running).where(JobRow.state.in_(LEASED)).group_by(JobRow.tenant).subquery()


def _last_served_per_tenant() -> Subquery:
    """Of tenants that wait, and one index look-up each: the table also holds every job that ever ended."""
    tenants = select(JobRow.tenant).where(JobRow.state == "queued").distinct().subquery()
    earlier = aliased(JobRow)
    served_at = select(func.max(earlier.claimed_at)).where(earlier.tenant == tenants.c.tenant)
    return select(tenants.c.tenant, served_at.scalar_subquery().label("served_at")).subquery()
