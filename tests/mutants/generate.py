"""Makes mutants of the SQL sections: a condition, a lock, a limit or an order is dropped, or a comparison is reversed.

`equal.list` names those that do not change what a statement means, with the reason. It may only shrink.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.mutants.catalogue import Mutant

EQUAL = Path(__file__).with_name("equal.list")
SQL = "src/duly/store/sql"
PART = re.compile(r"^-- (name|fragment): (\w+)$", re.MULTILINE)

# Which tests execute the operations of each file, by name in tests/contract. The first that fails ends the run, so the
# slow ones are last.
JUDGES = {
    "batch": "batches engine/test_batches plans",
    "claim": "claim shape enqueue rescue hazards statements plans",
    "dead": "dead hazards plans",
    "debounce": "debounce plans",
    "ended": "finish ended_schedule debounce dead enqueue batches prune plans",
    "enqueue": "enqueue statements batches plans",
    "finish": "finish rescue claim park debounce enqueue caller hazards plans",
    "lane": "lanes claim lanes_hazards plans",
    "prune": "prune figures finish plans",
    "queue": "retry shape figures reading claim statements plans",
    "read": "why figures reading statements plans",
    "schedule": "ended_schedule engine/test_schedules plans",
    "upkeep": "rescue park retry shape enqueue hazards plans",
}
NOT_ON = {"sqlite": "not postgres and not d1", "postgres": "not sqlite and not d1"}

OPPOSITES = (
    *(("=", "<>"), ("<", ">="), (">", "<="), ("in", "not in"), ("exists", "not exists"), ("is", "is not")),
    ("is distinct from", "is not distinct from"),
)
REVERSED = {**dict(OPPOSITES), **{right: left for left, right in OPPOSITES}, "not": ""}
LOCK = r"for (?:no key )?(?:update|share)(?: of \w+(?:, \w+)*)?(?: skip locked)?"
PHRASES = (
    r"is not distinct from|is distinct from|is not|not in|not exists|not materialized|order by|group by|partition by"
    rf"|union all|on conflict|left join|cross join|{LOCK}"
)
TOKEN = re.compile(
    r"--[^\n]*|'[^']*'|\b(?:" + PHRASES.replace(" ", r"\s+") + r")\b|::?\w+|[\w.]+|<>|<=|>=|->>|->|#>>|\|\||\S"
)
AFTER_ORDER = {"limit", "offset", "union", "union all", "except", "on conflict", "returning", ";"}
AFTER_CONDITION = {
    *AFTER_ORDER,
    *("order by", "group by", "partition by", "where", "on", "having", "when", "then", "else", "with", "as", "select"),
    *("from", "join", "left join", "cross join", "lateral", "set", "using", "values", "do", ","),
}


class Token(NamedTuple):
    start: int
    end: int
    text: str


class Change(NamedTuple):
    """A part of a section that is replaced, and what the list calls it."""

    start: int
    end: int
    new: str
    name: str


def generated(root: Path) -> list[Mutant]:
    """Return all that can be made, but for those that are equal."""
    known = equal()
    return [mutant for mutant in everything(root) if mutant.name not in known]


def equal() -> dict[str, str]:
    """Return the names of those that change no meaning, with the reasons."""
    lines = EQUAL.read_text("utf-8").splitlines() if EQUAL.exists() else []
    return dict(line.split(" | ", 1) for line in lines if line)  # type: ignore[misc]


def everything(root: Path) -> Iterator[Mutant]:
    for dialect, others in NOT_ON.items():
        for file in sorted((root / SQL / dialect).glob("*.sql")):
            judges = (name if "/" in name else f"contract/test_{name}" for name in JUDGES[file.stem].split())
            tests = f"{' '.join(f'tests/{name}.py' for name in judges)} -k '{others}'"
            _, *parts = PART.split(file.read_text("utf-8"))
            for kind, name, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
                seen: Counter[str] = Counter()
                for change in Section(text, dialect).changes():
                    seen[change.name] += 1
                    number = f" #{seen[change.name]}" if seen[change.name] > 1 else ""
                    new = text[: change.start] + change.new + text[change.end :]
                    label = f"{dialect} {name}: {change.name}{number}"
                    heading = f"-- {kind}: {name}\n"
                    yield Mutant(str(file.relative_to(root)), heading + text[1:], heading + new[1:], tests, label)


class Section:
    """The statements of a section as tokens; a level is what stands between two parentheses, or `case` and `end`."""

    def __init__(self, text: str, dialect: str) -> None:
        self.text, self.dialect = text, dialect
        found = (Token(*match.span(), " ".join(match[0].split())) for match in TOKEN.finditer(text))
        self.tokens = [token for token in found if not token.text.startswith("--")]
        self.closing: dict[int, int] = {}
        opened: list[int] = []
        for at, token in enumerate(self.tokens):
            if token.text in ("(", "case"):
                opened.append(at)
            elif token.text in (")", "end"):
                self.closing[opened.pop()] = at

    def changes(self) -> Iterator[Change]:
        yield from self.level(0, len(self.tokens))

    def level(self, first: int, last: int) -> Iterator[Change]:
        terms, comparisons, between, assigns, at = [first], [], False, False, first
        while at < last:
            text = self.tokens[at].text
            assignment = text == "=" and assigns
            if assignment or text in AFTER_CONDITION or text.startswith("for "):
                yield from self.condition(terms, comparisons, at)
                yield from self.without_clause(first, at, last)
                terms, comparisons = [at + 1], []
                assigns = text == "set" or (text == "," and self.is_in_set(first, at))
            elif text in REVERSED:
                comparisons.append(at)
            elif text in ("and", "or") and not between:
                terms.append(at)
            between = text == "between" or (between and text != "and")
            if at in self.closing:
                yield from self.level(at + 1, self.closing[at])
            at = self.closing.get(at, at) + 1
        yield from self.condition(terms, comparisons, last)

    def is_in_set(self, first: int, at: int) -> bool:
        """Return whether a comma separates assignments: `set` is nearer than what ends them."""
        inside = False
        while first < at:
            text = self.tokens[first].text
            inside = text == "set" or (inside and text not in ("from", "where", "returning", ";", "select"))
            first = self.closing.get(first, first) + 1
        return inside

    def condition(self, terms: list[int], comparisons: list[int], stop: int) -> Iterator[Change]:
        """Drop each term of a condition, or reverse the only one; after the first, each begins with `and` or `or`."""
        if len(terms) == 1:
            yield from map(self.reversed, comparisons)
            return
        yield self.drop(self.tokens[terms[0]].start, self.tokens[terms[1] + 1].start)
        for term, following in zip(terms[1:], [*terms[2:], stop], strict=True):
            yield self.drop(self.tokens[term - 1].end, self.tokens[following - 1].end)

    def reversed(self, at: int) -> Change:
        token = self.tokens[at]
        start, end = self.tokens[max(at - 1, 0)].start, self.tokens[at + 1].end
        return Change(token.start, token.end, REVERSED[token.text], f"reverse {short(self.text[start:end])}")

    def without_clause(self, first: int, at: int, last: int) -> Iterator[Change]:
        """Drop the order, the limit or the lock that begins here."""
        token = self.tokens[at]
        if token.text.startswith("for "):
            yield self.drop(self.tokens[at - 1].end, token.end)
            if token.text.endswith(" skip locked"):
                yield self.drop(self.text.index("skip", token.start), token.end)
        elif token.text == "order by" or (token.text == "limit" and not self.is_scalar(first)):
            stop = at + 1
            while (
                stop < last
                and self.tokens[stop].text not in AFTER_ORDER | {"limit"}
                and not self.tokens[stop].text.startswith("for ")
            ):
                stop = self.closing.get(stop, stop) + 1
            yield self.drop(self.tokens[at - 1].end, self.tokens[stop - 1].end)

    def is_scalar(self, first: int) -> bool:
        """Return whether SQLite takes one row of this level, with a limit or without."""
        rows = {"from", "join", "left join", "cross join", "lateral", "in", "not in", "as", "materialized"}
        return self.dialect == "sqlite" and first > 1 and self.tokens[first - 2].text not in rows

    def drop(self, start: int, end: int) -> Change:
        return Change(start, end, "", f"drop {short(self.text[start:end])}")


def short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 90 else f"{line[:89]}…"
