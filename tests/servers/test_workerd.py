from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers import workerd
from tests.servers.workerd import D1Gateway, GatewayError, Workerd

pytestmark = [
    pytest.mark.cloudflare,
    pytest.mark.skipif(workerd.why_not() is not None, reason=workerd.why_not() or ""),
]


@pytest.fixture(scope="module")
def runtime() -> Iterator[Workerd]:
    with Workerd(MAX_BODY_BYTES="4000000") as started:
        yield started


@pytest.fixture
def gateway(runtime: Workerd) -> Iterator[D1Gateway]:
    client = runtime.gateway()
    client.batch([("drop table if exists t", []), ("create table t (id text primary key, n integer)", [])])
    yield client
    client.close()


def members(group: int) -> list[str]:
    """Name the processes of a group that still run."""
    names = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, rest = stat.read_text().rsplit(")", 1)
        except OSError:
            continue
        state, _, its_group = rest.split()[:3]
        if int(its_group) == group and state != "Z":
            names.append(name)
    return names


def wait_until_empty(group: int, seconds: float = 10) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and members(group):
        time.sleep(0.02)
    assert members(group) == []


def test_rows_come_back_as_tuples(gateway: D1Gateway) -> None:
    assert gateway.query("insert into t values (?, ?) returning n, id", ["a", 5]) == [(5, "a")]
    assert gateway.query("select id from t where 0") == []
    assert gateway.query("select value as v from json_each(?1)", ['[5, "x", null]']) == [
        (5,),
        ("x",),
        (None,),
    ]


def test_numbers_bind_as_real_as_the_stand_in_has_it(gateway: D1Gateway) -> None:
    rows = gateway.query(
        "select ? / 2 as half, typeof(?) as kind, cast(? as text) as t, typeof(?) as b", [5, 5, 5, True]
    )
    assert rows == [(2.5, "real", "5.0", "real")]


def test_raw_gives_the_columns_of_nothing_and_columns_of_the_same_name(gateway: D1Gateway) -> None:
    assert gateway.raw("select id, n, id from t") == (["id", "n", "id"], [])
    gateway.query("insert into t values ('a', 1)")
    assert gateway.raw("select id, n, id from t") == (["id", "n", "id"], [("a", 1, "a")])
    batch = gateway.post("raw", {"batch": [{"sql": "select id, n from t"}, {"sql": "select id from t where 0"}]})
    assert [answer["results"] for answer in batch] == [
        {"columns": ["id", "n"], "rows": [["a", 1]]},
        {"columns": [], "rows": []},
    ]


def test_query_returns_the_number_of_changes(gateway: D1Gateway) -> None:
    result = gateway.post("query", {"sql": "insert into t values ('a', 1), ('b', 2)"})
    assert [answer["success"] for answer in result] == [True]
    assert result[0]["meta"]["changes"] == 2


def test_a_batch_is_one_transaction(gateway: D1Gateway) -> None:
    assert gateway.batch([("insert into t values ('a', 1)", []), ("select count(*) as n from t", [])]) == [
        [],
        [(1,)],
    ]
    with pytest.raises(GatewayError, match="UNIQUE constraint failed") as refused:
        gateway.batch([("insert into t values ('b', 1)", []), ("insert into t values ('a', 1)", [])])
    assert (refused.value.status, refused.value.code) == (400, 7500)
    assert gateway.query("select id from t") == [("a",)]


@pytest.mark.parametrize(
    ("sql", "params", "reason"),
    [
        ("begin", [], "To execute a transaction"),
        ("savepoint s", [], "To execute a transaction"),
        ("pragma journal_mode = wal", [], "not authorized"),
        ("attach ':memory:' as other", [], "not authorized"),
        ("vacuum", [], "VACUUM"),
        ("create temp table x (n)", [], "not authorized"),
        ("selec 1", [], "syntax error"),
        ("", [], "No SQL statements"),
        ("select absent", [], "no such column"),
        ("select ?", [], "Wrong number of parameter bindings"),
        (f"select {','.join('?' * 101)}", ["x"] * 101, "too many SQL variables"),
        ("select " + " union all select ".join("123456"), [], "too many terms"),
        (f"select '{'x' * 100_000}'", [], "too long"),
        ("select ?", ["x" * 3_000_000], "too big"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_mistake_in_sql_is_a_400(gateway: D1Gateway, sql: str, params: list[str], reason: str) -> None:
    with pytest.raises(GatewayError, match=reason) as refused:
        gateway.query(sql, params)
    assert (refused.value.status, refused.value.code) == (400, 7500)


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"null", b"[]", b"{}", b"\xff\xfe", b'{"sql": 1}', b'{"batch": []}', b'{"batch": [1]}'),
        *(b'{"batch": {"sql": "x"}}', b'{"sql": "?", "params": [[1]]}', b'{"sql": "?", "params": "x"}'),
    ],
)
def test_a_body_of_another_shape_is_a_400(gateway: D1Gateway, body: bytes) -> None:
    status, answer = gateway.request("POST", gateway.path + "/query", body)
    assert (status, answer["success"], answer["errors"][0]["code"]) == (400, False, 7400)


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        ("", 401),
        ("Bearer", 401),
        ("Basic dXNlcjpwYXNz", 401),
        ("Bearer wrong", 403),
        ("Bearer {}x", 403),
        ("bearer {}", 200),
    ],
)
def test_only_the_right_token_gets_in(runtime: Workerd, gateway: D1Gateway, authorization: str, status: int) -> None:
    headers = {"authorization": authorization.format(runtime.token)}
    body = json.dumps({"sql": "insert into t values ('seen', 1)"}).encode()
    assert gateway.request("POST", gateway.path + "/query", body, headers)[0] == status
    assert len(gateway.query("select id from t")) == (1 if status == 200 else 0)


def test_a_gateway_without_a_token_refuses_everyone() -> None:
    runtime = Workerd()
    runtime.token = ""
    with runtime:
        with pytest.raises(GatewayError, match="refuses every caller") as refused:
            runtime.gateway(token="any").query("select 1")
        assert refused.value.status == 500


def test_unknown_paths_and_databases_are_a_404(runtime: Workerd, gateway: D1Gateway) -> None:
    assert gateway.request("POST", "/elsewhere", b"{}")[0] == 404
    assert gateway.request("GET", gateway.path + "/query")[0] == 405
    with pytest.raises(GatewayError, match="another could not be found") as refused:
        runtime.gateway(database="another").query("select 1")
    assert (refused.value.status, refused.value.code) == (404, 7404)


def test_own_routes_get_every_request_but_the_gateways() -> None:
    mine = "fetch: (request, env, ctx) => Response.json({ success: true, mine: [env.DB_ID, typeof ctx.waitUntil] })"
    with Workerd(index=f'import {{ duly }} from "../duly/index.mjs"; export default duly({{ {mine} }});') as runtime:
        gateway = runtime.gateway()
        assert gateway.request("GET", "/orders/d1")[1]["mine"] == ["duly", "function"]
        assert gateway.query("select 1 as one") == [(1,)]


@pytest.mark.parametrize("headers", [{}, {"transfer-encoding": "chunked"}], ids=["told", "untold"])
def test_a_body_too_large_is_a_413(gateway: D1Gateway, headers: dict[str, str]) -> None:
    body = json.dumps({"sql": "select 1", "params": ["x" * 4_000_000]}).encode()
    if headers:
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    status, answer = gateway.request("POST", gateway.path + "/query", body, headers)
    assert (status, answer["errors"][0]["code"]) == (413, 7413)
    assert gateway.query("select 1 as one") == [(1,)]


def test_many_callers_at_once(runtime: Workerd, gateway: D1Gateway) -> None:
    def write(name: str) -> None:
        own = runtime.gateway()
        for n in range(20):
            own.batch([("insert into t values (?, 1)", [f"{name}-{n}"]), ("update t set n = n + 1", [])])
        own.close()

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert gateway.query("select count(*) as n, max(n) as most from t") == [(80, 81)]


@pytest.mark.slow
def test_committed_rows_survive_a_crash(tmp_path: Path) -> None:
    with Workerd(persist=tmp_path) as first:
        gateway = first.gateway()
        gateway.query("create table kept (n integer)")
        gateway.query("insert into kept values (7)")
        group = first.pid
        first.kill()
    assert group is not None
    wait_until_empty(group)
    with Workerd(persist=tmp_path) as second:
        assert second.gateway().query("select n from kept") == [(7,)]
        group = second.pid
    assert group is not None
    wait_until_empty(group)


def test_a_killed_test_run_takes_its_runtime_along() -> None:
    program = (
        "import time; from tests.servers.workerd import Workerd\n"
        "w = Workerd().start(); print(w.pid, w._folder, flush=True); time.sleep(60)"
    )
    run = subprocess.Popen([sys.executable, "-c", program], cwd=workerd.ROOT, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    pid, folder = run.stdout.readline().split()
    assert members(int(pid))
    run.send_signal(signal.SIGKILL)
    run.communicate()
    wait_until_empty(int(pid))
    assert not Path(folder).exists()
