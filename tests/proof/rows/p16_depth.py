"""P16: a claim costs the same however much lies before, behind and beside what it takes."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psycopg

from duly.model import Change, NewJob, State, Terms
from duly.rules import keys
from duly.store import ops
from duly.store.driver import Driver
from duly.store.op import Finish
from duly.store.postgres.driver import PostgresDriver
from duly.store.postgres.schema import bring_up_to_date
from duly.store.sqlite.driver import SQLiteDriver
from tests.proof import breaks
from tests.proof.table import ALL, Figure, Row, Setting
from tests.servers.postgres import PostgresServer

SHALLOW = 1_000
FIRST, TWIN = "1 k", "another 1 k"
TURN = 10
MOST = 1.3
HOUR_MS = 3_600_000
TERMS = Terms(task="known", keep_ms=0, lease_ms=60_000)


class Scene(NamedTuple):
    """A database with so many jobs of a kind beside a thousand ready ones."""

    name: str
    driver: Driver
    times: list[list[float]]

    def best(self, share: float) -> float:
        """Give a percentile in milliseconds, of the round in which it was lowest: other work only adds to it."""
        return min(sorted(times)[min(len(times) - 1, int(len(times) * share))] for times in self.times) * 1000


class Beside(NamedTuple):
    """What lies beside the jobs that are claimed: rows of a table, and what is special about them."""

    name: str
    table: str
    special: dict[str, str]
    many: int


def run(setting: Setting) -> Figure:
    """Claim from shallow and from deep databases in turns, and compare."""
    claims, rounds = (30, 1) if setting.broken else setting.pick((100, 5), (300, 10))
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for store in STORES:
        with STORES[store](setting.folder) as stores:
            scenes = [_scene(name, beside, stores) for name, beside in _scenes(setting)]
            for _ in range(rounds):
                _round(scenes, claims)
            found[store] = {scene.name: (scene.best(0.5), scene.best(setting.pick(0.9, 0.99))) for scene in scenes}
            for scene in scenes:
                scene.driver.close()
    return _figure(found, setting.pick(90, 99))


def _round(scenes: list[Scene], claims: int) -> None:
    """Claim from one after the other, so that whatever else this machine does meets all of them."""
    for scene in scenes:
        scene.times.append([])
    for _ in range(claims):
        for scene in scenes:
            scene.times[-1].append(_claim(scene.driver))


def _scenes(setting: Setting) -> list[tuple[str, Beside | None]]:
    """List the databases: two shallow ones, by which it is seen how far one and the same differs, and the deep ones."""
    deep = [(f"{beside.many // 1000:,} k {beside.name}", beside) for beside in _beside(setting)]
    return [(FIRST, None), (TWIN, None), *deep]


def _beside(setting: Setting) -> list[Beside]:
    many = 100_000
    more, most = setting.pick((many, many), (1_000_000, 5_000_000)) if setting.broken is None else (20_000, 20_000)
    return [
        Beside("ready", "duly_job", {"due_at": "due_at - n"}, more),
        Beside("scheduled", "duly_job", {"state": "'scheduled'", "due_at": f"due_at + {HOUR_MS} + n"}, more),
        Beside("finished", "duly_done", {}, most),
        Beside("unknown", "duly_job", {"task": "'unknown'", "priority": "10"}, min(more, many)),
    ]


class Stores:
    """Makes databases of one kind, and speaks to them without duly."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 0

    def new(self) -> tuple[str, Driver]:
        """Make a database; the driver does not wait for the disk, which would hide what is measured."""
        self._number += 1
        path = str(self._folder / f"depth-{self._number}.db")
        return path, SQLiteDriver(path, durability="off")

    def multiply(self, where: str, beside: Beside) -> None:
        """Copy the one row of a table many times."""
        conn = sqlite3.connect(where)
        columns = [row[1] for row in conn.execute(f"pragma table_info({beside.table})")]
        numbers = (
            f"with recursive numbers (n) as (select 1 union all select n + 1 from numbers where n < {beside.many})"
        )
        id_ = "printf('00000000-0000-7000-8000-%012x', n)"
        with conn:
            conn.execute(f"{numbers} {copy(beside, beside.table, columns, id_)} cross join numbers")
        conn.execute("analyze")
        conn.close()

    def tidy(self, where: str) -> None:
        """SQLite leaves nothing behind that would have to be swept up."""


class PostgresStores(Stores):
    """The same on a server."""

    def __init__(self, server: PostgresServer) -> None:
        self._server = server

    def new(self) -> tuple[str, Driver]:
        """Make a database."""
        url = self._server.new_database()
        bring_up_to_date(url)
        return url, PostgresDriver(url)

    def multiply(self, where: str, beside: Beside) -> None:
        """Copy the one row of a table many times."""
        with psycopg.connect(where, autocommit=True) as conn:
            asked = "select column_name from information_schema.columns where table_name = %s"
            columns = [str(row[0]) for row in conn.execute(asked, [beside.table])]
            id_ = "('00000000-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid"
            text = copy(beside, f"duly.{beside.table}", columns, id_)
            conn.execute(f"{text} cross join generate_series(1, {beside.many}) as numbers (n)")
            conn.execute("vacuum analyze")

    def tidy(self, where: str) -> None:
        """Do what autovacuum does within a minute: until then a claim steps over what was parked, at 1.4 x."""
        with psycopg.connect(where, autocommit=True) as conn:
            conn.execute("vacuum duly.duly_job")


def copy(beside: Beside, table: str, columns: list[str], id_: str) -> str:
    """Write the statement that copies the one row, with what is special."""
    values = {**{name: name for name in columns}, **beside.special, "id": id_}
    chosen = f"select {', '.join(values.values())} from (select * from {table}) as one"
    return f"insert into {table} ({', '.join(values)}) {chosen}"


@contextmanager
def _sqlite(folder: Path) -> Iterator[Stores]:
    yield Stores(folder)


@contextmanager
def _postgres(folder: Path) -> Iterator[Stores]:
    with PostgresServer() as server:
        yield PostgresStores(server)


STORES = {"SQLite": _sqlite, "PostgreSQL": _postgres}
_ids = keys.Ids()


def _scene(name: str, beside: Beside | None, stores: Stores) -> Scene:
    where, driver = stores.new()
    _register(driver)
    _enqueue(driver, 1)
    if beside is not None:
        if beside.table == "duly_done":
            _finish(driver)
        stores.multiply(where, beside)
        _park(driver)
        stores.tidy(where)
    _enqueue(driver, SHALLOW)
    for _ in range(20):
        _claim(driver)
    return Scene(name, driver, [])


def _register(driver: Driver) -> None:
    driver.run(ops.register("one", host="here", pid=1, queues=["default"], tasks=["known"], beat_ms=HOUR_MS))


def _enqueue(driver: Driver, count: int) -> None:
    driver.run(ops.enqueue(TERMS, [NewJob(_ids(), "{}") for _ in range(count)]))


def _finish(driver: Driver) -> None:
    """Have one job end that is kept."""
    driver.run(ops.enqueue(Terms(task="known", priority=1), [NewJob(_ids(), "{}")]))
    jobs = driver.run(ops.claim("default", limit=1, token=keys.new_token(), worker="one"))
    driver.run(ops.finish([Finish(job, Change(State.SUCCEEDED)) for job in jobs]))


def _park(driver: Driver) -> None:
    """Set aside what nobody knows, as the upkeep of a worker does."""
    while driver.run(ops.park("default", 1000)):
        pass


def _claim(driver: Driver) -> float:
    """Claim one turn and say how long it took; as many new jobs take the place of those that are done."""
    op = ops.claim("default", limit=TURN, token=keys.new_token(), worker="one", tasks=["known"])
    began = time.perf_counter()
    jobs = driver.run(op)
    took = time.perf_counter() - began
    if len(jobs) != TURN:
        raise AssertionError(f"{len(jobs)} jobs claimed instead of {TURN}")
    driver.run(ops.finish([Finish(job, Change(State.SUCCEEDED)) for job in jobs]))
    _enqueue(driver, TURN)
    return took


def _figure(found: dict[str, dict[str, tuple[float, float]]], high: int) -> Figure:
    parts, good, numbers = [], True, dict[str, Any]()
    for store, scenes in found.items():
        p50, top = scenes[FIRST]
        doubt = [max(1.0, one / other) for one, other in zip(scenes[TWIN], scenes[FIRST], strict=True)]
        parts.append(f"{store} p50 {p50:.2f} ms, p{high} {top:.2f} ms at 1 k")
        for name, (own50, own) in scenes.items():
            numbers[f"{store}, {name}"] = {"p50_ms": round(own50, 3), f"p{high}_ms": round(own, 3)}
            if name != FIRST:
                parts.append(f"{name} x {own50 / p50:.2f} and x {own / top:.2f}")
                good = good and own50 / p50 <= MOST * doubt[0] and own / top <= MOST * doubt[1]
    return Figure("; ".join(parts), good, numbers, only_slow=True)


# Without its index a claim reads every job there is.
breaks.sql("depth:by_index", ("claim", "where state = 'ready' and lane", "where lower(state) = 'ready' and lane"))

ROW = Row(
    "P16",
    "claims from deep queues, on both stores",
    "p50 and p90 of a claim at 100 k (p99, and 1 M and 5 M, in full) ready, scheduled, finished, unknown <= 1.3 x "
    "those at 1 k, more only by what another queue at 1 k differs",
    run,
    controls=("depth:by_index",),
    of_speed=True,
    full_only=True,
    takes=ALL,
    control_takes=ALL,
)
