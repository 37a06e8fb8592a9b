"""The SQL that fills a table in one statement: jobs with rising UUIDv7 ids, each due after the one before."""

from __future__ import annotations

from dataclasses import dataclass

from bench.contestant import PAYLOAD, QUEUE, TASK, WORKER
from duly.model import KEEP_MS

START_MS = 1_750_000_000_000
FAR_MS = 10 * 365 * 86_400_000

NUMBERS = {
    "sqlite": """(with recursive n(i) as (select {first} union all select i + 1 from n where i < {last})
                  select i from n)""",
    "postgres": "generate_series({first}::bigint, {last}::bigint) as n(i)",
}
ID = {
    "sqlite": "printf('%08x-%04x-7%03x-8000-%012x', {moment} >> 16, {moment} & 65535, i - i / 20 * 20, i)",
    "postgres": """(lpad(to_hex({moment}), 12, '0') || '7' || lpad(to_hex(i - i / 20 * 20), 3, '0') || '8000'
                    || lpad(to_hex(i), 12, '0'))::uuid""",
}
COMMON = "id, task, queue, priority, state, payload, max_attempts, created_at, due_at, lease_ms, keep_ms, result_ttl_ms"
ENDED = "attempt, crashes, token, worker, finished_at, prune_at, replay_count"


@dataclass(frozen=True)
class Filling:
    """Which jobs are put where. `numbered` ones are called with their number, as the tasks of `duly bench` are."""

    store: str
    schema: str = ""
    task: str = TASK
    numbered: bool = False
    start_ms: int = START_MS
    keep: bool = True

    def ready(self, first: int, rows: int) -> str:
        """Write the insert of ready jobs number `first` and on."""
        return self._live("ready", self._moment, first, rows)

    def scheduled(self, first: int, rows: int) -> str:
        """Write the insert of jobs that are due in ten years."""
        return self._live("scheduled", f"{self._moment} + {FAR_MS}", first, rows)

    def done(self, first: int, rows: int) -> str:
        """Write the insert of jobs that have succeeded, and that no upkeep prunes while we look."""
        return f"""insert into {self.schema}duly_done ({COMMON}, {ENDED})
                   select {self._id}, '{self.task}', '{QUEUE}', 0, 'succeeded', {self._payload}, 5, {self._moment},
                          {self._moment}, 30000, {self._keep_ms}, 86400000,
                          1, 0, i, '{WORKER}', {self._moment}, {self._moment} + {FAR_MS}, 0
                     from {self._numbers(first, rows)}"""

    def bare(self, first: int, rows: int) -> str:
        """Write the insert of the limit's rows."""
        return f"""insert into bare
                   select {self._id}, '{QUEUE}', 'ready', {self._payload}, {self._moment}, null, null
                     from {self._numbers(first, rows)}"""

    def _live(self, state: str, due_at: str, first: int, rows: int) -> str:
        return f"""insert into {self.schema}duly_job ({COMMON})
                   select {self._id}, '{self.task}', '{QUEUE}', 0, '{state}', {self._payload}, 5, {self._moment},
                          {due_at}, 30000, {self._keep_ms}, 86400000
                     from {self._numbers(first, rows)}"""

    def _numbers(self, first: int, rows: int) -> str:
        return NUMBERS[self.store].format(first=first, last=first + rows - 1)

    @property
    def _moment(self) -> str:
        return f"({self.start_ms} + i / 20)"  # twenty jobs a millisecond

    @property
    def _id(self) -> str:
        return ID[self.store].format(moment=self._moment)

    @property
    def _payload(self) -> str:
        return """'{"n":' || i || '}'""" if self.numbered else f"'{PAYLOAD}'"

    @property
    def _keep_ms(self) -> int:
        return KEEP_MS if self.keep else 0
