"""Everything that duly sends to D1, by name and number: the gateway runs these statements and no others."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING

from duly.store import migrate, statements

if TYPE_CHECKING:
    from collections.abc import Mapping

_CLOCK = statements.CLOCK["sqlite"].replace(":now", "null")
# `json` of a text that is no JSON fails, and a statement that fails rolls its batch back.
_OF_D1 = {
    # First in a batch: after the time `?1` of the database's clock the batch changes nothing.
    "deadline": (f"select case when {_CLOCK} > ?1 then json('too late') else {_CLOCK} end as now",),
    "meta": ("select name, value from duly_meta",),
}
_FIRST = "select case when exists (select 1 from sqlite_master where name = 'duly_meta')"
_NEXT = "select case when (select value from duly_meta where name = 'schema') is not '{}'"
_MIGRATED = " then json('migrated meanwhile') end as migrated"


@cache
def sections() -> Mapping[str, tuple[str, ...]]:
    """Return the statements of each section, with numbered parameters."""
    names = statements.sections("sqlite")
    ours = {name: tuple(one.sql for one in statements.spell("sqlite", name, "numbered")) for name in names}
    return MappingProxyType(ours | _OF_D1)


@cache
def migrations() -> Mapping[int, tuple[str, ...]]:
    """Return the statements of each migration. The first one fails if the schema is not the one before."""
    found, before = {}, 0
    for step in migrate.migrations("sqlite"):
        guard = (_NEXT.format(before) if before else _FIRST) + _MIGRATED
        found[step.number] = (guard, *step.statements)
        before = step.number
    return MappingProxyType(found)


@cache
def digest() -> str:
    """Return the SHA-256 of all statements. The gateway refuses a caller with another one."""
    text = json.dumps([dict(sections()), dict(migrations())], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
