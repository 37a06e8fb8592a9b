"""Every mutant can be judged: its text stands once in its module, and its tests exist."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from functools import cache, partial
from itertools import product
from pathlib import Path

from _pytest.mark.expression import Expression

from duly.store import ops, statements
from duly.store.sqlite.driver import SQLiteDriver
from tests.mutants import catalogue, fits, generate

ROOT = Path(__file__).parents[2]
MUTANTS = catalogue.load()
GENERATED = list(generate.everything(ROOT))
STORES = "sqlite postgres d1"
DEFINED = re.compile(r"^(?:async )?def (test_\w+)", re.MULTILINE)


def test_the_text_of_each_mutant_stands_once_in_its_module() -> None:
    assert {(mutant.file, mutant.old): why for mutant in MUTANTS if (why := fits.without_text(ROOT, mutant))} == {}


def test_each_mutant_names_tests_that_exist() -> None:
    judges = map(fits.split, {mutant.tests: mutant for mutant in [*MUTANTS, *GENERATED]}.values())
    assert [(path, words) for paths, words in judges for path in paths if not may_choose(ROOT / path, words)] == []


def may_choose(path: Path, words: str) -> bool:
    """Guess from the text whether `-k` chooses a test. A word that stands beside the names may be a parameter."""
    if not words or not path.exists():
        return path.exists()
    expression = Expression.compile(words)
    for file in [path] if path.is_file() else path.rglob("test_*.py"):
        names, beside = read(file)
        free = [word for word in set(re.findall(r"\w+", words)) - {"and", "or", "not"} if word in beside]
        for values in product((True, False), repeat=len(free)):
            given = dict(zip(free, values, strict=True))
            if any(expression.evaluate(partial(is_named, given, name)) for name in names):
                return True
    return False


def is_named(given: dict[str, bool], name: str, word: str, /, **_: object) -> bool:
    return word in name or given.get(word, False)


@cache
def read(file: Path) -> tuple[list[str], str]:
    """Return the names of the tests of a file, with its own, and the rest of its text with the names of the stores."""
    text = file.read_text("utf-8")
    names = [f"{file.name} {name}" for name in DEFINED.findall(text)]
    return names, f"{STORES} {DEFINED.sub('', text)}"


def test_the_lists_are_written_as_relocating_writes_them() -> None:
    for path in catalogue.FOLDER.glob("*.txt"):
        text = path.read_text("utf-8")
        assert "\n".join(catalogue.lines(catalogue.parse(text))) + "\n" == text


def test_each_mutant_that_is_excused_is_one_that_is_generated() -> None:
    assert generate.equal().keys() <= {mutant.name for mutant in GENERATED}


def test_what_is_generated_is_sql(tmp_path: Path) -> None:
    driver = SQLiteDriver(tmp_path / "jobs.db")
    driver.run(ops.clock())
    driver.close()
    text = "".join(file.read_text("utf-8") for file in sorted((ROOT / generate.SQL / "sqlite").glob("*.sql")))
    known = {sql for section in statements.sections("sqlite").values() for sql in section}
    wrong = []
    with closing(sqlite3.connect(tmp_path / "jobs.db")) as conn:
        for mutant in [mutant for mutant in GENERATED if "sqlite" in mutant.file][::20]:
            changed = statements.parse(mutant.change(text), "sqlite").values()
            assert mutant.change(text) != text
            for sql in {sql for section in changed for sql in section} - known:
                statement = statements._spell(sql, "sqlite", "named", "duly")
                try:
                    conn.execute(f"explain {statement.sql}", dict.fromkeys(statement.parameters))
                except sqlite3.OperationalError as error:
                    wrong.append((mutant.name, str(error)))
    assert [each for each in wrong if each[1] != "no query solution"] == []  # `indexed by` needs its condition
