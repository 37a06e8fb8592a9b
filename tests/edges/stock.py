"""Databases with something in them for the tests of commands, and what all of those tests ask alike."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import psycopg
import pytest
from click.testing import CliRunner, Result

from duly import Duly
from duly.cli import main
from duly.model import Change, Claimed, Failure, JobRecord, NewJob, State, Terms
from duly.rules.keys import Ids
from duly.store import ops
from duly.store.op import Finish, Held
from tests.databases import fresh
from tests.edges.programs import say
from tests.edges.watch import Watch

new_id = Ids()
DOWN = "postgresql://nobody@127.0.0.1:1/db"
IS_DOWN = "PostgreSQL 127.0.0.1:1/db cannot be reached (Connection refused): see that it runs, look at the URL"
S = TypeVar("S", bound="Stock")


class Stock:
    """A database with a few jobs in every state, made with the operations that workers use."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.app = Duly(url)
        self.app.driver.run(ops.clock())
        self._token = 0

    def fill(self) -> Self:
        self.enqueue("mail", 3, queue="mail", delay_ms=300_000)
        self.end(self.enqueue("add", 2), Change(State.SUCCEEDED, result="3"))
        self.end(self.enqueue("boom", 3), dead("no \x1b[31mway"))
        self.end(self.enqueue("part"), Change(State.PARTIAL, reason="one channel was closed"))
        self.end(self.enqueue("approve"), Change(State.WAITING, reason="approval", give_back_attempt=True))
        again = Change(State.SCHEDULED, after_ms=60_000, error=Failure("builtins.OSError", "net", "a traceback"))
        self.end(self.enqueue("again"), again)
        self.run(ops.cancel(self.enqueue("stop"), by="eve", why="not wanted"))
        self.enqueue("long")
        [job] = self.claim()
        self.run(ops.progress(Held(job.id, job.token), 40, "parsing"))
        self.enqueue("next", 2)
        self.run(ops.pause("queue", "mail", by="eve", why="mail server is down", until_ms=3_600_000))
        self.register("w1", succeeded=10, failed=2)
        return self

    def run(self, op: Any) -> Any:
        return self.app.driver.run(op)

    def enqueue(self, task: str, count: int = 1, *, key: str | None = None, **terms: Any) -> list[str]:
        jobs = [NewJob(new_id(), '{"n":1}', key=key) for _ in range(count)]
        self.run(ops.enqueue(Terms(task=task, **terms), jobs))
        return [job.id for job in jobs]

    def claim(self, limit: int = 2000) -> list[Claimed]:
        self._token += 1
        return list(self.run(ops.claim("default", limit=limit, token=self._token, worker="w1")))

    def end(self, ids: list[str], change: Change, *, now: int | None = None) -> list[str]:
        claimed = self.claim()
        assert [job.id for job in claimed] == ids
        self.run(ops.finish([Finish(job, change) for job in claimed], now=now))
        return ids

    def register(self, worker: str, **more: Any) -> None:
        known = {"queues": ["default"], "tasks": ["add", "boom"], "beat_ms": 600_000, "slots": 4}
        self.run(ops.register(worker, host="here", pid=42, **{**known, **more}))

    def jobs(self, **filters: Any) -> list[JobRecord]:
        return self.app.list(**filters)

    def one(self, state: str) -> str:
        return self.jobs(state=state)[0].id

    def state(self, job_id: str) -> str:
        job = self.app.get(job_id)
        assert job is not None
        return str(job.state)

    def say(self, *words: str, **options: Any) -> Result:
        """Run a command in this process."""
        environ = {"DULY_URL": self.url, "USER": "eve", "DULY_APP": None}
        return CliRunner().invoke(main, words, env=environ, **options)


def dead(message: str = "no") -> Change:
    return Change(State.DEAD, reason="attempts used up", error=Failure("ValueError", message, "a traceback"))


def to_look_at(kind: type[S]) -> Any:
    """Make the fixture that gives all tests of a module that only look one database."""

    @pytest.fixture(scope="module")
    def looked_at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S]:
        made = kind(str(tmp_path_factory.mktemp("looking") / "jobs.db")).fill()
        yield made
        made.app.close()

    return looked_at


def fresh_of(kind: type[S]) -> Any:
    """Make the fixture that gives a test that changes something a full database of its own."""

    @pytest.fixture(params=["sqlite", "postgres"])
    def full(request: pytest.FixtureRequest) -> Iterator[S]:
        made = kind(fresh(request, request.param)).fill()
        yield made
        made.app.close()

    return full


def empty_of(kind: type[S]) -> Any:
    """Make the fixture that gives a test a database with nothing in it."""

    @pytest.fixture
    def empty(request: pytest.FixtureRequest) -> Iterator[S]:
        made = kind(fresh(request, "sqlite"))
        yield made
        made.app.close()

    return empty


def told(stock: Stock, *words: str, code: int = 0) -> str:
    """Run a command and give what it prints."""
    answer = say(Path("/"), *words, DULY_URL=stock.url, USER="eve")
    assert answer.returncode == code, answer
    assert "Traceback" not in answer.stderr
    return answer.stdout


def shape(value: Any) -> Any:
    """Give what does not depend on when it was made: all names, and whatever is no number and no id."""
    if isinstance(value, dict):
        return {name: shape(one) for name, one in value.items()}
    if isinstance(value, list):
        return [shape(one) for one in value]
    return "number" if isinstance(value, int | float) else re.sub(r"[0-9a-f-]{36}", "id", str(value))


class Mistake(NamedTuple):
    words: str
    code: int
    said: str


def answer_to(mistake: Mistake, answer: Result) -> None:
    """A mistake is answered on stderr: in one line, or in two where the second says how to get help."""
    assert answer.exit_code == mistake.code, answer.output
    assert mistake.said in answer.stderr
    assert "Traceback" not in answer.output
    assert answer.stdout == ""
    first, *more = answer.stderr.splitlines()
    assert first.startswith("duly: ")
    assert more == [] or (len(more) == 1 and re.fullmatch(r"Try '.* --help'", more[0])), answer.stderr


@contextmanager
def shut(url: str) -> Iterator[None]:
    """Let nobody into a database for a while."""
    name = database_of(url)
    with psycopg.connect(url.replace(name, "postgres"), autocommit=True) as server:
        server.execute(f"alter database {name} allow_connections false")
        server.execute("select pg_terminate_backend(pid) from pg_stat_activity where datname = %s", [name])
        yield
        server.execute(f"alter database {name} allow_connections true")


def database_of(url: str) -> str:
    return re.search(r"/([^/?]+)(\?|$)", url.removeprefix("postgresql://"))[1]


def asked_and_said_no(*words: str, **how: Any) -> str:
    """Run the real program, say no to what it asks, and give the question."""
    with Watch(*words, terminal=["stdin"], **how) as asked:
        asked.answer("n\n")
        out, err = asked.ended()
        assert (asked.process.returncode, out) == (1, "")
    return err
