"""Who waits for news of a job hears of it, by one look for all who wait."""

import asyncio
from collections.abc import Collection, Mapping

import pytest
from sqlalchemy.exc import OperationalError

from service.news import News


class Jobs:
    """Numbers of newest events as the store tells them; what is asked is noted. May fail first."""

    def __init__(self, **last: int) -> None:
        self.last = last
        self.asked: list[set[str]] = []
        self.failures: list[Exception] = []

    def last_events(self, job_ids: Collection[str]) -> Mapping[str, int]:
        self.asked.append(set(job_ids))
        if self.failures:
            raise self.failures.pop(0)
        return {job_id: self.last[job_id] for job_id in job_ids if job_id in self.last}


def test_one_look_serves_all_who_wait() -> None:
    jobs = Jobs(a=3, b=3, c=3)

    async def main() -> list[str]:
        news = News(jobs.last_events, every_s=0.01)
        heard: list[str] = []

        async def listen(job_id: str) -> None:
            await news.after(job_id, 3)
            heard.append(job_id)

        tasks = [asyncio.create_task(listen(job_id)) for job_id in "aabc"]
        await asyncio.sleep(0.1)
        assert heard == []
        jobs.last = {"a": 4, "b": 3}  # c has ended: it is told of no more
        await asyncio.sleep(0.1)
        assert sorted(heard) == ["a", "a", "c"]
        jobs.last = {}
        await asyncio.gather(*tasks)
        return heard

    assert sorted(asyncio.run(main())) == ["a", "a", "b", "c"]
    assert jobs.asked[0] == {"a", "b", "c"}


def test_nobody_is_asked_while_nobody_waits() -> None:
    jobs = Jobs(a=1)

    async def main() -> None:
        news = News(jobs.last_events, every_s=0.01)
        await news.after("a", 0)
        looks = len(jobs.asked)
        await asyncio.sleep(0.1)
        assert len(jobs.asked) == looks
        await news.after("a", 0)  # the next one is served like the first

    asyncio.run(main())


def test_a_listener_that_went_away_is_forgotten() -> None:
    jobs = Jobs(a=1)

    async def main() -> None:
        news = News(jobs.last_events, every_s=0.01)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(news.after("a", 1), 0.05)
        await asyncio.sleep(0.05)
        looks = len(jobs.asked)
        await asyncio.sleep(0.05)
        assert len(jobs.asked) == looks

    asyncio.run(main())


def test_a_database_that_is_away_is_waited_for() -> None:
    jobs = Jobs(a=1)
    jobs.failures = [OperationalError("select", {}, Exception("away"))] * 3
    asyncio.run(News(jobs.last_events, every_s=0.01).after("a", 0))
    assert len(jobs.asked) == 4


def test_any_other_failure_reaches_those_who_wait() -> None:
    jobs = Jobs(a=1)
    jobs.failures = [ValueError("a mistake")]
    with pytest.raises(ValueError, match="a mistake"):
        asyncio.run(News(jobs.last_events, every_s=0.01).after("a", 0))
