"""The judge: reads what producers and handlers wrote down themselves, never the queue's own tables.

Five things must not be: a job that was acknowledged and never ran to its end (lost, or stuck if it had begun), one that
ran and was never offered (unexpected), one whose end was acknowledged twice (doubled), and one that ran again although
nothing had happened to its first run (unjustified).
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Record: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """One run of a handler, as it wrote it down. `how` is None where it never came to its end."""

    id: str
    token: int
    pid: int
    begun: float
    ended: float | None = None
    how: str | None = None

    def overlaps(self, since: float, until: float) -> bool:
        """Whether it ran at some moment between the two."""
        return self.begun <= until and (self.ended is None or self.ended >= since)


@dataclass
class History:
    """Everything that was written down."""

    offered: set[str] = field(default_factory=set)
    acknowledged: set[str] = field(default_factory=set)
    runs: dict[str, list[Run]] = field(default_factory=lambda: defaultdict(list))
    done: dict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))  # ends, by the token
    ended: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))  # how they are said to have ended
    died: dict[int, float] = field(default_factory=dict)  # processes that were killed, and when
    troubles: list[tuple[float, float]] = field(default_factory=list)  # from when to when nobody could keep a lease
    stopped: dict[int, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))


@dataclass(frozen=True)
class Findings:
    """What is wrong; all five are to be empty. Justified duplicates are counted, for the record."""

    lost: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    doubled: tuple[str, ...] = ()
    unjustified: tuple[str, ...] = ()
    stuck: tuple[str, ...] = ()
    acknowledged: int = 0
    duplicates: int = 0

    @property
    def valid(self) -> bool:
        """Whether nothing is wrong."""
        return not (self.lost or self.unexpected or self.doubled or self.unjustified or self.stuck)

    def __str__(self) -> str:
        parts = ("lost", "unexpected", "doubled", "unjustified", "stuck")
        wrong = ", ".join(f"{len(getattr(self, part))} {part}" for part in parts if getattr(self, part))
        return f"{self.acknowledged:,} acknowledged: {wrong or 'clean'}, {self.duplicates} justified duplicates"


def read(records: Iterable[Record]) -> History:
    """Put together what many hands wrote."""
    history = History()
    begun: dict[tuple[str, int, int], Run] = {}
    for record in records:
        match record["what"]:
            case "offered":
                history.offered.add(record["id"])
            case "acknowledged":
                history.offered.add(record["id"])
                history.acknowledged.add(record["id"])
            case "begun":
                run = Run(record["id"], record["token"], record["pid"], record["at"])
                begun[run.id, run.token, run.pid] = run
            case "ended":
                key = (record["id"], record["token"], record["pid"])
                first = begun.get(key) or Run(*key, record["at"])
                begun[key] = Run(*key, first.begun, record["at"], record["how"])
            case "told":
                history.done[record["id"]][record["token"]] += 1
                history.ended[record["id"]].add(record["how"])
            case "killed":
                history.died[record["pid"]] = record["at"]
            case "stopped":
                history.stopped[record["pid"]].append((record["at"], record["until"]))
            case "trouble":
                history.troubles.append((record["at"], record["until"]))
            case other:
                raise ValueError(f"nobody knows what {other!r} means")
    for run in begun.values():
        history.runs[run.id].append(run)
    return history


def judge(history: History) -> Findings:
    """Say what is wrong with a history."""
    succeeded = {job for job, runs in history.runs.items() if any(run.how == "ok" for run in runs)}
    finished = set(history.done) | succeeded
    missing = history.acknowledged - finished
    unjustified: list[str] = []
    duplicates = 0
    for job, runs in history.runs.items():
        for first, again in _pairs(runs):
            if _justified(first, again, history):
                duplicates += 1
            else:
                unjustified.append(job)
    return Findings(
        lost=tuple(sorted(job for job in missing if job not in history.runs)),
        stuck=tuple(sorted(job for job in missing if job in history.runs)),
        unexpected=tuple(sorted(set(history.runs) - history.offered)),
        doubled=tuple(sorted(job for job, tokens in history.done.items() if len(tokens) > 1)),
        unjustified=tuple(sorted(set(unjustified))),
        acknowledged=len(history.acknowledged),
        duplicates=duplicates,
    )


def _pairs(runs: list[Run]) -> Iterable[tuple[Run, Run]]:
    """Give each run that came after another which had not failed."""
    ordered = sorted(runs, key=lambda run: run.begun)
    for first, again in itertools.pairwise(ordered):
        if first.how not in ("failed", "snoozed", "released") or (first.ended or 0) > again.begun:
            yield first, again


def _justified(first: Run, again: Run, history: History) -> bool:
    """Say whether something had happened to the first run, so that its lease could end before the second began."""
    if history.died.get(first.pid, float("inf")) <= again.begun:
        return True
    stops = [*history.troubles, *history.stopped.get(first.pid, ())]
    return any(at <= again.begun and first.overlaps(at, until) for at, until in stops)
