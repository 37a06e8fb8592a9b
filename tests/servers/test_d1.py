from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.d1 import D1Error, D1Lost, D1Mannered


@pytest.fixture
def d1(tmp_path: Path) -> Iterator[D1Mannered]:
    store = D1Mannered(tmp_path / "d1.db")
    store.query("create table t (id text primary key, n integer) strict")
    yield store
    store.close()


@pytest.mark.parametrize(
    ("sql", "reason"),
    [
        ("begin", "a batch is the transaction"),
        ("BEGIN IMMEDIATE", "a batch is the transaction"),
        ("/* so */ commit", "a batch is the transaction"),
        ("end", "a batch is the transaction"),
        ("rollback", "a batch is the transaction"),
        ("savepoint s", "a batch is the transaction"),
        ("release s", "a batch is the transaction"),
        ("pragma user_version", "PRAGMA"),
        ("pragma journal_mode = wal", "PRAGMA"),
        ("select * from pragma_table_info('t')", "PRAGMA"),
        ("attach ':memory:' as other", "ATTACH"),
        ("detach other", "DETACH"),
        ("vacuum", "VACUUM"),
        ("create temp table x (n)", "TEMP"),
        ("create temporary view x as select 1", "TEMP"),
        ("create temp trigger x after insert on t begin select 1; end", "TEMP"),
        ("select 1; select 2", "one statement"),
        ("select absent", "no such column: absent"),
        ("selec 1", "syntax error"),
        ("select " + " union all select ".join("123456"), "too many terms in compound SELECT"),
        ("select " + "+".join("1" * 101), "Expression tree is too large"),
        (f"select 'a' like '{'%' * 51}'", "pattern too complex"),
        (f"select max({','.join('1' * 33)})", "too many arguments"),
        (f"select {','.join('1' * 101)}", "too many columns"),
        (f"select '{'x' * 100_000}'", "longer than 100,000 bytes"),
        (f"select '{'ä' * 50_000}'", "longer than 100,000 bytes"),
        ("select zeroblob(2000001)", "too big"),
        ("select ?101", "between \\?1 and \\?100"),
    ],
    ids=lambda text: text[:24],
)
def test_it_refuses(d1: D1Mannered, sql: str, reason: str) -> None:
    with pytest.raises(D1Error, match=reason):
        d1.query(sql)
    assert d1.query("select 1") == [(1,)]


def test_the_limits_themselves_are_still_within(d1: D1Mannered) -> None:
    assert d1.query("select " + " union all select ".join("12345"))[-1] == (5,)
    assert d1.query("select " + "+".join("1" * 100)) == [(100,)]
    assert d1.query(f"select 'a' like '{'%' * 50}'") == [(1,)]
    assert d1.query(f"select max({','.join('1' * 32)})") == [(1,)]
    assert d1.query(f"select '{'x' * 99_991}'") == [("x" * 99_991,)]
    assert d1.query("select ?", ["x" * 1_999_990])[0][0] == "x" * 1_999_990
    assert len(d1.query(f"select {','.join('?' * 100)}", ["x"] * 100)[0]) == 100


@pytest.mark.parametrize("name", [":name", "@name", "$name"])
def test_it_refuses_named_parameters_but_not_text_that_looks_like_them(d1: D1Mannered, name: str) -> None:
    with pytest.raises(D1Error, match="Named parameters"):
        d1.query(f"select {name}", ["x"])
    hidden = f"select '{name} ? it''s', ? as \"{name} ?\" /* {name} ? */ -- {name} ?"
    assert d1.query(hidden, ["x"]) == [(f"{name} ? it's", "x")]


@pytest.mark.parametrize(
    ("sql", "params", "reason"),
    [
        ("select ?", [], "0 given, 1 needed"),
        ("select ?1", ["a", "b"], "2 given, 1 needed"),
        ("select 1", ["a"] * 101, "too many SQL variables"),
        (f"select {','.join('?' * 101)}", ["a"] * 101, "too many SQL variables"),
        ("select ?", ["x" * 2_000_001], "longer than 2,000,000 bytes"),
        ("select ?", ["ä" * 1_000_001], "longer than 2,000,000 bytes"),
        ("select ?", [b"bytes"], "'bytes' not supported"),
        ("select ?", [[1]], "'list' not supported"),
        ("select ?", [float("nan")], "'float' not supported"),
        ("select ?", [float("inf")], "'float' not supported"),
        ("select ?", [10**400], "'int' not supported"),
        ("select ?", ["\ud800"], "surrogates"),
    ],
    ids=str,
)
def test_it_refuses_parameters(d1: D1Mannered, sql: str, params: list[str], reason: str) -> None:
    with pytest.raises(D1Error, match=reason):
        d1.query(sql, params)


def test_numbers_bind_as_real(d1: D1Mannered) -> None:
    assert d1.query("select ? / 2, typeof(?), cast(? as text)", [5, 5, 5]) == [(2.5, "real", "5.0")]
    assert d1.query("select typeof(?), ?", [True, None]) == [("real", None)]
    assert d1.query("select ? = 9007199254740993", [9007199254740993]) == [(0,)]
    d1.query("insert into t values ('a', ?)", [5])
    assert d1.query("select n, typeof(n) from t") == [(5, "integer")]
    rows = d1.query("select value, type from json_each(?1)", ['[5, 9007199254740993, "x"]'])
    assert rows == [(5, "integer"), (9007199254740993, "integer"), ("x", "text")]


def test_placeholders_may_be_numbered_repeated_and_mixed(d1: D1Mannered) -> None:
    assert d1.query("select ?2, ?1, ?2", ["a", "b"]) == [("b", "a", "b")]
    assert d1.query("select ?2, ?, ?1", ["a", "b", "c"]) == [("b", "c", "a")]


def test_a_batch_is_one_transaction(d1: D1Mannered) -> None:
    answers = d1.batch([("insert into t values (?, 1) returning id", ["a"]), ("select count(*) from t", [])])
    assert answers == [[("a",)], [(1,)]]
    with pytest.raises(D1Error, match=r"UNIQUE.*SQLITE_CONSTRAINT \(extended: SQLITE_CONSTRAINT_PRIMARYKEY\)"):
        d1.batch([("insert into t values ('b', 1)", []), ("insert into t values ('a', 1)", [])])
    with pytest.raises(D1Error, match="a batch is the transaction"):
        d1.batch([("insert into t values ('b', 1)", []), ("commit", [])])
    assert d1.query("select id from t") == [("a",)]
    with pytest.raises(D1Error, match="at least one"):
        d1.batch([])


def test_a_constraint_that_speaks_up_at_the_commit_undoes_the_batch(d1: D1Mannered) -> None:
    d1.query("create table child (id text references t (id) deferrable initially deferred)")
    with pytest.raises(D1Error, match="FOREIGN KEY"):
        d1.query("insert into child values ('nobody')")
    assert d1.query("select count(*) from child") == [(0,)]


def test_an_answer_can_get_lost_after_the_commit(tmp_path: Path) -> None:
    asked: list[int] = []

    def second(call: int) -> bool:
        asked.append(call)
        return call == 2

    d1 = D1Mannered(tmp_path / "d1.db", lose=second)
    d1.query("create table t (n)")
    with pytest.raises(D1Lost, match="Network connection lost"):
        d1.query("insert into t values (1)")
    assert d1.query("select n from t") == [(1,)]
    d1.lose, d1.lost = (lambda _: True), lambda: TimeoutError("gone")
    with pytest.raises(TimeoutError, match="gone"):
        d1.query("insert into t values (2)")
    d1.lose = None
    assert d1.query("select count(*) from t") == [(2,)]
    assert (asked, d1.calls) == ([1, 2, 3], 5)
    d1.close()


def test_many_callers_share_one_file(d1: D1Mannered, tmp_path: Path) -> None:
    other = D1Mannered(tmp_path / "d1.db")

    def write(store: D1Mannered, name: str) -> None:
        for n in range(25):
            store.query("insert into t values (?, 1)", [f"{name}-{n}"])

    threads = [threading.Thread(target=write, args=(s, f"{i}")) for i, s in enumerate([d1, d1, other, other])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert other.query("select count(*) from t") == [(100,)]
    other.close()
