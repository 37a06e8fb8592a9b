"""The classic clock-driven queue of docs/guides/clock-queue.md: what it does minute by minute, and its traps."""

from __future__ import annotations

import asyncio
import importlib.util
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from duly import Duly
from duly.errors import JobDead
from duly.model import State
from duly.rules.firing import MISSED, OVERLAP
from duly.testing import Clock, frozen
from duly.worker.tick import Ticked, Ticker

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "clock-queue.md"
NOON = datetime(2026, 11, 16, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)


class Queue:
    """The app of the page under a clock that stands still, and a crontab that ticks it."""

    def __init__(self, tasks: ModuleType, clock: Clock) -> None:
        self.app: Duly = tasks.app
        self.send_invoice: Any = tasks.send_invoice
        self.fetch_rates: Any = tasks.fetch_rates
        self.clock = clock
        self.tries: list[tuple[str, str, int]] = []  # task, when, which attempt
        self.app.events.listen(self._hear)

    def _hear(self, name: str, fields: dict[str, Any]) -> None:
        if name in ("job.failed", "job.dead"):
            self.tries.append((fields["task"], f"{self.clock.now:%H:%M}", fields["attempt"]))

    def tries_of(self, task: str) -> list[tuple[str, int]]:
        return [(at, attempt) for name, at, attempt in self.tries if name == task]

    def tick(self) -> Ticked:
        return asyncio.run(Ticker(self.app, limit=100, signals=False).tick())

    def run_until(self, end: datetime) -> None:
        """Tick each minute."""
        while self.clock.now <= end:
            self.tick()
            self.clock.advance(MINUTE)


@pytest.fixture(params=["sqlite", "postgres"])
def tasks(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Import the file that the page shows."""
    url = request.getfixturevalue("postgres_url") if request.param == "postgres" else str(tmp_path / "jobs.db")
    monkeypatch.setenv("DULY_URL", url)
    [text] = re.findall(r"^```python\n(# tasks\.py\n.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    file = tmp_path / "clock_queue_tasks.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    module.app.close()


@pytest.fixture
def queue(tasks: ModuleType) -> Iterator[Queue]:
    with frozen(tasks.app, NOON) as clock:
        yield Queue(tasks, clock)


def test_s10_a_tick_takes_no_more_than_a_hundred_due_rows(queue: Queue) -> None:
    queue.send_invoice.enqueue_many(queue.send_invoice.call(order) for order in range(250))
    said = [queue.tick() for _ in range(4)]
    assert [(one.ran, one.more) for one in said] == [(100, True), (100, True), (50, False), (0, False)]


def test_r01_all_three_delays_are_waited_for(queue: Queue) -> None:
    job = queue.send_invoice.enqueue(7)
    queue.run_until(NOON + 40 * MINUTE)
    assert queue.tries_of("send_invoice") == [("12:00", 1), ("12:01", 2), ("12:06", 3), ("12:36", 4)]
    record = queue.app.get(job.id)
    assert record is not None
    assert (record.state, record.attempt, record.max_attempts) == (State.DEAD, 4, 4)


def test_r01_with_three_attempts_the_third_delay_is_warned_about(tasks: ModuleType) -> None:
    with pytest.warns(UserWarning, match="never used"):
        tasks.app.task(backoff=tasks.DELAYS, max_attempts=3, name="one_too_few")(lambda: None)


def test_r04_a_one_shot_that_died_stays_in_sight_until_somebody_deals_with_it(queue: Queue) -> None:
    job = queue.send_invoice.enqueue(7)
    for delay in ("0s", "1m", "5m", "30m", "365d", "1m"):
        queue.clock.advance(delay)
        queue.tick()
    assert [attempt for _, attempt in queue.tries_of("send_invoice")] == [1, 2, 3, 4]
    [dead] = [one for one in queue.app.dead.list() if one.task == "send_invoice"]
    assert (dead.id, dead.reason) == (job.id, "attempts used up")
    assert "the mail server is down" in (dead.error or "")
    with pytest.raises(JobDead, match="attempts used up"):
        job.result()
    again = queue.app.dead.replay(job.id, by="ada")
    queue.tick()
    assert queue.tries_of("send_invoice")[-1][1] == 1
    assert again != job.id


@pytest.mark.slow
def test_s07_a_recurring_one_that_died_fires_at_its_next_regular_time_with_its_counter_at_zero(queue: Queue) -> None:
    queue.run_until(NOON + 2 * HOUR + 10 * MINUTE)
    first = [("13:00", 1), ("13:01", 2), ("13:06", 3), ("13:36", 4)]
    second = [("14:00", 1), ("14:01", 2), ("14:06", 3)]
    assert queue.tries_of("fetch_rates") == first + second
    schedule = queue.app.schedules.get("fetch_rates")
    assert schedule is not None
    assert (schedule.dead_runs, schedule.paused_at) == (1, None)
    assert [one.outcome for one in queue.app.schedules.fires("fetch_rates")] == ["fired", "fired"]


@pytest.mark.slow
def test_s06_due_times_that_fall_into_the_retries_are_recorded_and_the_next_one_fires(queue: Queue) -> None:
    queue.app.schedules.create("often", queue.fetch_rates, "10m", overlap="skip")
    queue.run_until(NOON + 50 * MINUTE)
    assert queue.tries_of("fetch_rates") == [("12:10", 1), ("12:11", 2), ("12:16", 3), ("12:46", 4), ("12:50", 1)]
    fired, skipped, first = queue.app.schedules.fires("often")
    assert (fired.outcome, first.outcome) == ("fired", "fired")
    assert (skipped.count, skipped.reason) == (3, OVERLAP)  # 12:20, 12:30 and 12:40


def test_s05_after_hours_without_a_tick_a_recurring_one_runs_once(queue: Queue) -> None:
    queue.tick()
    queue.clock.advance("5h30m")
    queue.tick()
    assert queue.tries_of("fetch_rates") == [("17:30", 1)]
    fired, skipped = queue.app.schedules.fires("fetch_rates")
    assert (fired.outcome, fired.due_at) == ("fired", int((NOON + 5 * HOUR).timestamp() * 1000))
    assert (skipped.count, skipped.reason) == (4, MISSED)
