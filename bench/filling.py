"""The SQL that fills a table in one statement: jobs with rising UUIDv7 ids, each due after the one before."""

from __future__ import annotations

from bench.contestant import PAYLOAD, QUEUE, TASK, WORKER
from duly.model import KEEP_MS

START_MS = 1_750_000_000_000
MOMENT = f"({START_MS} + i / 20)"  # twenty jobs a millisecond

NUMBERS = {
    "sqlite": """(with recursive n(i) as (select {first} union all select i + 1 from n where i < {last})
                  select i from n)""",
    "postgres": "generate_series({first}::bigint, {last}::bigint) as n(i)",
}
ID = {
    "sqlite": f"printf('%08x-%04x-7%03x-8000-%012x', {MOMENT} >> 16, {MOMENT} & 65535, i - i / 20 * 20, i)",
    "postgres": f"""(lpad(to_hex({MOMENT}), 12, '0') || '7' || lpad(to_hex(i - i / 20 * 20), 3, '0') || '8000'
                    || lpad(to_hex(i), 12, '0'))::uuid""",
}
COMMON = "id, task, queue, priority, state, payload, max_attempts, created_at, due_at, lease_ms, keep_ms, result_ttl_ms"
ENDED = "attempt, crashes, token, worker, finished_at, prune_at, replay_count"


def filling(store: str, table: str, first: int, rows: int, *, keep: bool) -> str:
    """Write the insert of jobs number `first` and on into the table of `live`, `done` or `bare` ones."""
    keep_ms = KEEP_MS if keep else 0
    numbers = NUMBERS[store].format(first=first, last=first + rows - 1)
    schema = "duly." if store == "postgres" else ""
    common = f"'{PAYLOAD}', 5, {MOMENT}, {MOMENT}, 30000, {keep_ms}, 86400000"
    match table:
        case "bare":
            return f"""insert into bare
                       select {ID[store]}, '{QUEUE}', 'ready', '{PAYLOAD}', {MOMENT}, null, null from {numbers}"""
        case "live":
            return f"""insert into {schema}duly_job ({COMMON})
                       select {ID[store]}, '{TASK}', '{QUEUE}', 0, 'ready', {common} from {numbers}"""
        case "done":
            return f"""insert into {schema}duly_done ({COMMON}, {ENDED})
                       select {ID[store]}, '{TASK}', '{QUEUE}', 0, 'succeeded', {common},
                              1, 0, i, '{WORKER}', {MOMENT}, {MOMENT} + {keep_ms}, 0 from {numbers}"""
    raise ValueError(table)
