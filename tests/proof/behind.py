"""A plugin of pytest for P18: all that duly opens goes through PgBouncer, and how each test ended is written down.

`python -m pytest -p tests.proof.behind` runs what concerns PostgreSQL, less what is left out with a reason, and writes
to the file that `$PROOF_LEDGER` names. Tests that turn out not to touch PostgreSQL are not written down.
"""

from __future__ import annotations

import os
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from duly.store.postgres import driver, schema
from tests.proof.ledger import Ledger
from tests.servers import pgbouncer

pgbouncer.lead_schema(schema)  # before anybody takes names from them
pgbouncer.lead_driver(driver)

# Why a test cannot go through PgBouncer in transaction mode, by a part of its name.
LEFT_OUT = {
    "test_a_worker_can_say_which_server_it_works_on": "names the server's port",
    "test_the_url_to_listen_on_reaches_the_driver": "is about listen_url not being set",
    "test_a_broken_connection_is_counted": "PgBouncer replaces broken connections to the server by itself",
    "test_a_connection_that_the_server_hung_up_on": "PgBouncer replaces broken connections to the server by itself",
    "test_each_thing_that_is_wrong_on_a_server_is_named": "changes the settings of the driver's own sessions",
    "test_an_app_and_its_tasks_open_nothing": "counts what its process has open, where leading it here loads more",
    "test_a_transaction_that_stays_open_is_named": "names the server's process of a connection",
}
TOUCHED = ("touches", "postgres")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    about = [item for item in items if _may_touch(item)]
    kept = [item for item in about if _reason(item) is None]
    for item in about:
        if item not in kept:
            _ledger().note("left_out", test=item.nodeid, why=_reason(item))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def _may_touch(item: pytest.Item) -> bool:
    """Say whether a test may need a server: what takes `request` may ask for one later."""
    if any(word.startswith(("sqlite", "d1", "aiosqlite")) for word in _parameters(item)):
        return False
    return _touches(item) or "request" in signature(getattr(item, "function", int)).parameters


def _touches(item: pytest.Item) -> bool:
    named = any(word.startswith("postgres") for word in _parameters(item))
    return named or "postgres" in getattr(item, "fixturenames", ())


def _parameters(item: pytest.Item) -> list[str]:
    call = getattr(item, "callspec", None)
    return [str(value) for value in call.params.values()] if call else []


def _reason(item: pytest.Item) -> str | None:
    return next((why for part, why in LEFT_OUT.items() if part in item.nodeid), None)


def pytest_fixture_setup(fixturedef: Any, request: Any) -> None:
    if fixturedef.argname == "postgres_url":
        request.node.user_properties.append(TOUCHED)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if _touches(item):
        item.user_properties.append(TOUCHED)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write down what ended in this process; with several, each runs its own and one hears of all."""
    elsewhere = hasattr(report, "node")
    if TOUCHED in report.user_properties and not elsewhere and (report.when == "call" or not report.passed):
        _ledger().note("test", test=report.nodeid, how=report.outcome, why=_last(report))


def _last(report: pytest.TestReport) -> str:
    if report.passed:
        return ""
    lines = str(report.longrepr).strip().splitlines()
    telling = [line for line in lines if "prepared statement" in line]  # what is to be expected where they are left on
    errors = [line[1:].strip() for line in lines if line.startswith("E  ") and "Use -v" not in line]
    return (telling or errors or lines)[-1].strip()[-300:]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    _ledger().note("through", transactions=sum(pgbouncer.passed))


def _ledger() -> Ledger:
    return Ledger(Path(os.environ["PROOF_LEDGER"]))
