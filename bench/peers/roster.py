"""Who takes part: each contestant with its settings, what it keeps of a finished job, and how durable it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MEASURES = {
    "a": "enqueue one by one",
    "b": "enqueue in bulk, by 1,000",
    "c": "drain, one worker process",
    "d": "drain, two worker processes",
    "e": "pick-up of an idle worker in another process",
    "f": "cost of the drain with one worker process",
}
# (f) is what (c) cost: whoever is asked for it runs (c).
DRAINS = frozenset("cdf")
EVERYTHING = frozenset(MEASURES)
NO_BULK = EVERYTHING - {"b"}  # there is no call that adds many jobs

SYNCED = "fsync at every commit"
NORMAL = "synchronous=NORMAL: a power cut loses the last commits"
EVERY_SECOND = "AOF synced every second: a crash loses up to that"


@dataclass(frozen=True)
class Contestant:
    """One way to use one system: whose script it is, and the words every command of it ends with."""

    name: str
    peer: str
    store: str
    settings: tuple[str, ...]
    keep: str
    durability: str = SYNCED
    measures: frozenset[str] = EVERYTHING
    # Slow ones get fewer jobs, so that a run ends in time.
    most_jobs: int = 20_000
    most_calls: int = 2_000

    @property
    def key(self) -> str:
        return f"{self.store}: {self.name}"

    @property
    def ours(self) -> bool:
        return self.peer == "duly"

    def plain(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "peer": self.peer,
            "store": self.store,
            "settings": list(self.settings),
            "keep": self.keep,
            "durability": self.durability,
            "measures": "".join(sorted(self.measures)),
        }


def duly_on(store: str) -> tuple[Contestant, ...]:
    """Give duly's contestants; the first is the one that its peers are compared with: its defaults, async handlers."""
    kept, gone = "row kept as history", "nothing (keep=0)"
    return (
        Contestant("duly, async", "duly", store, ("async", "kept"), kept),
        Contestant("duly, sync", "duly", store, ("sync", "kept"), kept),
        Contestant("duly, async, keep=0", "duly", store, ("async", "gone"), gone, measures=DRAINS),
        Contestant("duly, sync, keep=0", "duly", store, ("sync", "gone"), gone, measures=DRAINS),
    )


# PgQueuer: per batch size the best of one manager, one with a pool of 5, and 5 managers (its own benchmark has 5).
# Huey: one thread is its fastest; 4 are what people run. taskito: async handlers, 100 a claim and a poll every ms,
# which was far ahead of its defaults in one trial. Others: what their documentation has for throughput, not tried out.
CONTESTANTS = (
    *duly_on("postgres"),
    Contestant("PgQueuer, batch 10", "pgqueuer", "postgres", ("10", "5", "single"), "log row kept"),
    Contestant("PgQueuer, batch 100", "pgqueuer", "postgres", ("100", "5", "single"), "log row kept", measures=DRAINS),
    Contestant("PgQueuer, batch 1000", "pgqueuer", "postgres", ("1000", "1", "pool"), "log row kept", measures=DRAINS),
    Contestant("awa", "awa", "postgres", ("100",), "row kept for a time", most_jobs=10_000, most_calls=500),
    Contestant("Oban", "oban", "postgres", ("20",), "row kept a day", most_jobs=5_000, most_calls=1_000),
    Contestant("Procrastinate", "procrastinate", "postgres", ("20",), "row kept", most_jobs=2_000, most_calls=1_000),
    Contestant("DBOS", "dbos", "postgres", ("50",), "row kept", measures=NO_BULK, most_jobs=2_000, most_calls=500),
    *duly_on("sqlite"),
    Contestant(
        "Huey, 1 thread", "huey", "sqlite", ("1",), "nothing", measures=NO_BULK, most_jobs=10_000, most_calls=1_000
    ),
    Contestant("Huey, 4 threads", "huey", "sqlite", ("4",), "nothing", measures=DRAINS, most_jobs=10_000),
    Contestant("taskito", "taskito", "sqlite", ("100", "1", "4"), "row kept", NORMAL, most_jobs=5_000),
    Contestant("honker, batch 1000", "honker", "sqlite", ("1000",), "nothing", NORMAL),
    Contestant(
        "taskiq, streams", "taskiq", "redis", ("100",), "stream entry kept", EVERY_SECOND, NO_BULK, most_jobs=5_000
    ),
    Contestant("Dramatiq", "dramatiq", "redis", ("8",), "nothing", EVERY_SECOND, NO_BULK, most_jobs=5_000),
    Contestant(
        "Celery",
        "celery",
        "redis",
        ("threads", "4"),
        "nothing",
        EVERY_SECOND,
        NO_BULK,
        most_jobs=2_000,
        most_calls=1_000,
    ),
)
STORES = tuple(dict.fromkeys(one.store for one in CONTESTANTS))
