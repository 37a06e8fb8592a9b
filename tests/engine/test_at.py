"""One app on several databases. Line H05.

The app's own database cannot be reached in these tests: what is done with another one never needs it.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, cast

import psycopg
import pytest

from duly import Ctx, Duly, SyncCtx
from duly.errors import ConfigError, JobNotFound, LeaseLost, QueueFull
from duly.model import State
from duly.testing import drain, frozen, inline, isolated
from tests.databases import fresh
from tests.engine.conftest import HOLDABLE, _d1_driver, found, steal, work, work_until
from tests.engine.test_no_io import python

NOWHERE = {"sqlite": "nowhere/never.db", "d1": "nowhere/never.db", "postgres": "postgresql://127.0.0.1:1/never"}


class Family(NamedTuple):
    """An app whose own database is not there, and the same app on two that are."""

    app: Duly
    eu: Duly
    us: Duly


@pytest.fixture
def family(where: tuple[str, str], request: pytest.FixtureRequest) -> Iterator[Family]:
    kind, url = where
    with ExitStack() as stack:
        if kind == "postgres":
            other = stack.enter_context(request.getfixturevalue("postgres_pool").lend(request.node))
        else:
            other = fresh(request, kind, "other.db")
        app = Duly(NOWHERE[kind], lease="2s", poll="100ms")
        made = Family(app, app.at(url), app.at(other))
        for shard in made[1:]:
            stack.callback(shard.close)
            if kind == "d1":
                shard.database.driver = _d1_driver(shard.settings.url.path or "")
        yield made
        assert "driver" not in vars(app.database)  # its own was never opened


def tasks(app: Duly) -> Any:
    @app.task(max_attempts=1, on_dead="mourn", aliases=["labour"])
    def toil(n: int) -> int:
        if n < 0:
            raise ValueError(n)
        return n * 2

    @app.task
    def mourn(job_id: str) -> None: ...

    @app.task
    def finish() -> None: ...

    return toil


def test_h05_two_databases_share_no_job_key_batch_or_dead_letter(family: Family) -> None:
    app, eu, us = family
    toil = tasks(app)  # after `at`
    first, second = (toil.using(app=shard, key="k").enqueue(21) for shard in (eu, us))
    lost = toil.using(app=us).enqueue(-1)
    assert toil.using(app=eu, key="k").enqueue(21).id == first.id != second.id
    assert eu.why(first.id).facts.state == "ready"
    with pytest.raises(JobNotFound):
        us.why(first.id)
    with eu.batch("import", on_complete="finish") as batch:
        toil.using(app=eu).enqueue(3)
        assert batch.fill(toil.using(app=eu).call(n) for n in (4, 5)) == 2
    work(eu)
    assert (first.result(5), found(us, second.id).state) == (42, State.READY)
    work(us)
    assert second.result(5) == 42
    assert (eu.get(second.id), us.get(first.id)) == (None, None)
    assert ([job.id for job in us.dead.list()], eu.dead.list()) == ([lost.id], [])
    counts = [[len(shard.list(task=name)) for shard in (eu, us)] for name in ("mourn", "finish")]
    assert counts == [[0, 1], [1, 0]]
    assert (batch.progress().succeeded, us.batches.list()) == (3, [])
    us.dead.replay(lost.id)
    work(us)
    assert len(us.dead.list()) == 1


def test_h05_a_job_and_what_follows_from_it_stay_in_one_database(family: Family) -> None:
    app, eu, us = family

    @app.task
    def plain() -> None: ...

    @app.task
    def done() -> None: ...

    @app.task
    async def follow(ctx: Ctx) -> None:
        await plain.aenqueue()
        await plain.using(app=us, key=ctx.key).aenqueue()  # its lease cannot be checked there
        await us.tasks["plain"].using(key=f"{ctx.key}:taken").aenqueue()
        with eu.batch("inner", on_complete=done):
            plain.enqueue_many([plain.call()])

    job = follow.using(app=eu).enqueue()
    work(eu)
    assert found(eu, job.id).state is State.SUCCEEDED
    assert sorted(one.task for one in eu.list()) == ["done", "follow", "plain", "plain"]
    assert {(one.task, one.key) for one in us.list()} == {("plain", job.id), ("plain", f"{job.id}:taken")}


def test_h05_what_follows_goes_home_if_a_handler_names_its_app(app: Duly) -> None:
    @app.task
    def plain() -> None: ...

    @app.task
    def follow() -> None:
        plain.using(app=app).enqueue()

    follow.using(app=app.at("eu.db")).enqueue()
    work(app.at("eu.db"))
    assert [one.task for one in app.list()] == ["plain"]


@pytest.mark.slow
def test_h05_a_lost_lease_is_noticed_in_a_database_that_is_opened_twice(
    family: Family, apps: Callable[..., Duly]
) -> None:
    app, eu, _ = family
    raised: list[LeaseLost] = []

    @apps().task  # on the same database
    def theirs() -> None: ...

    @app.task(lease="30s")
    def zombie(ctx: SyncCtx) -> None:
        if ctx.attempt == 1:
            steal(eu, ctx.job_id)
            with pytest.raises(LeaseLost) as lost:
                theirs.enqueue()
            raised.append(lost.value)

    job = zombie.using(app=eu).enqueue()
    work_until(eu, lambda: found(eu, job.id).state.ended)
    assert (len(raised), eu.list(task="theirs")) == (1, [])


def test_h05_a_queue_that_is_full_in_one_database_is_not_full_in_another(family: Family) -> None:
    app, eu, us = family
    toil = tasks(app)
    eu.limit(queue="default", depth=1)
    toil.using(app=us).enqueue(1)
    toil.using(app=eu).enqueue(1)
    with pytest.raises(QueueFull):
        toil.using(app=eu).enqueue(2)
    toil.using(app=us).enqueue(2)
    assert [len(shard.list()) for shard in (eu, us)] == [1, 2]


def test_h05_schedules_in_code_run_in_each_database_that_has_a_worker(family: Family) -> None:
    app, eu, us = family

    @app.every("1h", catchup="all")
    def report() -> None: ...

    with frozen(eu) as clock:
        clock.advance("2h")
        drain(eu)
    assert eu.schedules.in_code == ("report",)
    assert (len(eu.schedules.fires("report")), us.schedules.list()) == (2, [])


def test_h05_listeners_are_shared_and_counts_are_not(family: Family) -> None:
    app, eu, us = family
    heard: list[str] = []
    app.events.listen(lambda name, fields: heard.append(name))
    tasks(app).using(app=eu).enqueue(1)
    work(eu)
    assert "job.succeeded" in heard
    assert (eu.events.counts["job.succeeded"], us.events.counts["job.succeeded"]) == (1, 0)


def test_h05_test_helpers_take_one_database(family: Family, url: str) -> None:
    app, eu, us = family
    toil = tasks(app)
    with isolated(eu), inline(eu):
        assert toil.using(app=eu).enqueue(4).result(0) == 8
        assert app.at(url) is eu
    assert (eu.list(), us.list()) == ([], [])


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Duly:
    """An app on a file that these tests do not make."""
    monkeypatch.chdir(tmp_path)
    return Duly("never.db")


def test_h05_at_returns_one_object_for_a_place_and_opens_nothing(app: Duly, tmp_path: Path) -> None:
    eu = app.at("eu.db")
    assert type(eu) is Duly
    assert app.at(Path("eu.db")) is eu.at("eu.db") is app.at("us.db").at("eu.db") is eu
    assert app.at("postgresql://h/eu", schema="other") is not app.at("postgresql://h/eu")
    assert eu.settings.schema == "duly"
    assert eu.database.new_id is app.database.new_id  # forks know each for ever
    assert [*tmp_path.iterdir()] == []
    held = weakref.ref(eu)
    del eu
    assert held() is None


def test_h05_threads_that_come_at_once_get_one_object(app: Duly) -> None:
    got: list[Duly] = []
    begin = threading.Barrier(8)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=lambda: (begin.wait(), got.append(app.at("eu.db")))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert len({id(shard) for shard in got}) == 1


def test_h05_a_database_that_nothing_uses_is_closed_and_one_in_use_is_not_opened_twice(app: Duly) -> None:
    toil, others = tasks(app), set(threading.enumerate())

    def threads(name: str) -> list[threading.Thread]:
        return [one for one in threading.enumerate() if one.name.startswith(f"duly-{name}") and one not in others]

    with app.at("eu.db").batch("import") as batch:
        toil.using(app=app.at("eu.db")).enqueue(1)  # the batch holds the database, and nothing the app
    assert batch.progress().total == 1
    assert len(threads("writer")) == 1
    del batch
    gc.collect()
    for thread in (*threads("close"), *threads("writer"), *threads("checkpoint")):
        thread.join(10)
    assert threads("") == []
    assert not Path("never.db").exists()


def test_h05_settings_are_the_apps_but_for_the_place(
    app: Duly, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DULY_LISTEN_URL", "postgresql://db/own")
    monkeypatch.setenv("DULY_URL", "postgresql://db/own")
    (tmp_path / "duly.toml").write_text("max_attempts = 9")
    own = Duly("postgresql://127.0.0.1:1/never", schema="ours", lease="7s")
    monkeypatch.chdir("/")  # the folder of the app counts
    assert own.at("eu.db").settings.url.path == str(tmp_path / "eu.db")
    shard = own.at("postgresql://eu/shop")
    settings = shard.settings
    assert (settings.url.dsn, settings.schema, settings.listen_url) == ("postgresql://eu/shop", "ours", None)
    assert (settings.max_attempts, settings.lease_ms) == (9, 7000)


@pytest.mark.parametrize("wrong", [None, 5, object()])
def test_h05_at_takes_a_url_or_a_path(app: Duly, wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"app\.at\(\) takes a URL or a path.*use using\(conn=\)"):
        app.at(wrong)
    with pytest.raises(ConfigError, match="'mysql:' is not a database URL"):
        app.at("mysql://db/shop")
    for give in (lambda: app.at("eu.db", schema="eu"), lambda: Duly("eu.db", schema="eu")):
        with pytest.raises(ConfigError, match="schema= is for PostgreSQL: give each tenant a file of its own"):
            give()
    assert Duly("postgresql://h/shop", schema="eu").at("eu.db").settings.url.path  # a schema that others have


def test_h05_an_app_shows_its_database_without_the_password_and_opens_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    app = Duly(tmp_path / "none" / "shard-0.db")
    shown = [repr(one) for one in (app, app.at("shard-1.db"), app.at("postgresql://a:geheim@one:5432/shop?x=geheim"))]
    assert shown == [f"<Duly {tmp_path}/none/shard-0.db>", "<Duly shard-1.db>", "<Duly PostgreSQL one:5432/shop>"]
    assert repr(app.at("d1://geheim@gate.example")) == "<Duly D1 gate.example>"
    assert not (tmp_path / "none").exists()
    (tmp_path / "duly.toml").write_text("lease = 'soon'")
    assert repr(app.at("shard-2.db")) == "<Duly>"  # what is wrong is said by the first operation


def test_h05_using_app_refuses_what_is_not_this_app(app: Duly) -> None:
    toil, eu, us = tasks(app), app.at("eu.db"), app.at("us.db")
    stranger = Duly("stranger.db")
    tasks(stranger)
    wrong: list[tuple[Callable[[], Any], str]] = [
        (lambda: toil.using(app=eu, conn=object()), r"conn= decides the database: leave app= out"),
        (lambda: toil.using(app=eu).using(conn=object()), r"conn= decides the database"),
        (lambda: toil.using(app="eu.db"), r"toil: app= is of type str: give what app\.at\(url\) returns"),
        (lambda: toil.using(app=cast("Any", None)), r"toil: app= is None: give what app\.at\(url\) returns"),
        (lambda: toil.using(app=stranger), r"toil: app= does not know this task"),
        (lambda: app.batch("b", on_complete=toil.using(app=eu)), r"using\(app=…\), which a callback cannot have"),
        (lambda: app.schedules.create("s", toil.using(app=eu).call(1), "1h"), r"using\(app=\) makes no sense"),
    ]
    for use, said in wrong:
        with pytest.raises(ConfigError, match=said):
            use()
    other = r"toil would be added to another database than that of .*: write toil\.using\(app=…\)"
    with eu.batch("import") as batch:
        for add in (
            lambda: toil.enqueue(1),
            lambda: toil.using(app=us).enqueue(1),
            lambda: toil.using(batch=batch).enqueue(1),
            lambda: batch.fill([toil.call(1)]),
        ):
            with pytest.raises(ConfigError, match=other):
                add()
    assert batch.progress().total == 0
    assert not Path("never.db").exists()


def test_h05_two_schemas_are_two_databases_also_in_a_transaction_of_the_caller(app: Duly, postgres_url: str) -> None:
    toil = tasks(app)
    ann, bob = (app.at(postgres_url, schema=name) for name in ("ann", "bob"))
    for shard in (ann, bob):
        shard.migrate()
    with psycopg.connect(postgres_url) as conn:
        job = ann.tasks["toil"].using(conn=conn).enqueue(21)
    toil.using(app=bob).enqueue(1)
    work(ann)
    assert (job.result(0), [len(shard.list()) for shard in (ann, bob)]) == (42, [1, 1])
    for shard in (ann, bob):
        shard.close()


FORK = """
import os, sys, warnings
from duly import Duly

warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
app = Duly("never.db")
eu = app.at(sys.argv[1])

@app.task
def send(number: int) -> None: ...

send.using(app=eu).enqueue(0)
pid = os.fork()
if pid == 0:
    assert app.at(sys.argv[1]) is eu
    send.using(app=eu).enqueue(1)
    eu.close()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
send.using(app=eu).enqueue(2)
assert sorted(job.payload["number"] for job in eu.list()) == [0, 1, 2]
eu.close()
assert not os.path.exists("never.db")
"""


@pytest.mark.slow
@HOLDABLE
def test_h05_a_fork_goes_on_with_the_databases_of_its_parent(url: str, tmp_path: Path) -> None:
    python(FORK, url, cwd=tmp_path)


SHOP = """
import os
from duly import Duly, SyncCtx

app = Duly("never.db")

@app.task
def note(pid: int) -> None: ...

@app.task(isolation="process")
def apart(ctx: SyncCtx) -> int:
    ctx.heartbeat()
    note.enqueue(os.getpid())
    return os.getpid()
"""

WORKS = """
import os, sys
from shop import app, apart, note

eu = app.at(sys.argv[1], schema="other" if "://" in sys.argv[1] else None)
eu.migrate()
job = apart.using(app=eu).enqueue()
eu.run(drain=True)
pid = job.result(5)
assert pid != os.getpid()
assert [one.payload for one in eu.list(task="note")] == [{"pid": pid}]
assert not os.path.exists("never.db")
eu.close()
"""


@pytest.mark.slow
@HOLDABLE
def test_h05_child_processes_of_a_worker_use_its_database(url: str, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    python(f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{WORKS}", url, cwd=tmp_path)
