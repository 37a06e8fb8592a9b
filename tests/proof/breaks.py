"""Defences taken away on purpose: each row of the proof must turn red without the one it shows.

A break is a change to one section of SQL or to one function, made in the test's own processes and never in the product.
Processes that a row starts hear of it by `$PROOF_BREAK`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from duly.store import statements

VARIABLE = "PROOF_BREAK"
ROW = "PROOF_ROW"  # whose defences these are: to load all rows takes a worker longer than to start
BREAKS: dict[str, Callable[[], Callable[[], None]]] = {}
# The sections of SQL without which a break changes nothing, as far as that is known.
TOUCHED: dict[str, frozenset[str]] = {}


def sql(name: str, *changes: tuple[str, str, str], dialects: tuple[str, ...] = ("sqlite", "postgres")) -> None:
    """Add a break that changes texts of sections, each given as (section, old, new); the old must stand there once."""

    def apply() -> Callable[[], None]:
        before: dict[tuple[str, str], tuple[str, ...]] = {}
        for dialect in dialects:
            sections = statements.sections(dialect)
            for section, old, new in changes:
                whole = ";\n".join(sections[section])
                if whole.count(old) != 1:
                    raise AssertionError(f"{name}: {old!r} stands {whole.count(old)} times in {dialect}/{section}")
                before.setdefault((dialect, section), sections[section])
                sections[section] = tuple(part for part in whole.replace(old, new).split(";\n") if part.strip())
        statements.spell.cache_clear()

        def undo() -> None:
            for (dialect, section), was in before.items():
                statements.sections(dialect)[section] = was
            statements.spell.cache_clear()

        return undo

    BREAKS[name] = apply
    TOUCHED[name] = frozenset(section for section, _, _ in changes)


def python(name: str, owner: Any, attribute: str, value: Any, *, touches: str | None = None) -> None:
    """Add a break that replaces an attribute of a module or a class.

    Where that makes no difference before a section of SQL is run for the first time, `touches` may name it.
    """
    if touches is not None:
        TOUCHED[name] = frozenset([touches])

    def apply() -> Callable[[], None]:
        before = getattr(owner, attribute)
        setattr(owner, attribute, value)
        return lambda: setattr(owner, attribute, before)

    BREAKS[name] = apply


@contextmanager
def broken(*names: str, row: str = "") -> Iterator[None]:
    """Take defences away here and in the processes started meanwhile."""
    undo = [BREAKS[name]() for name in names]
    before = {variable: os.environ.get(variable) for variable in (VARIABLE, ROW)}
    os.environ.update({VARIABLE: ",".join(names), ROW: row})
    try:
        yield
    finally:
        for one in reversed(undo):
            one()
        for variable, was in before.items():
            os.environ.pop(variable) if was is None else os.environ.update({variable: was})


def apply_named() -> None:
    """Take the defences away that the starting process has named."""
    named = [name for name in os.environ.get(VARIABLE, "").split(",") if name]
    if named:
        from tests.proof.table import rows

        rows([row for row in [os.environ.get(ROW)] if row])  # every row says which defences it can take away
    for name in named:
        BREAKS[name]()
