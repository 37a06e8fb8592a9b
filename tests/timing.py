"""What tests cost, and their order: wall and processor time with all processes, sleeps, starts, databases, asserts."""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

MOST_CPU, LONG_S = 1.0, 0.3  # of a test that is not marked `slow`; tests known to take longer run first
# Processor seconds for the tests of a folder ("": those above the folders), and for those of any other.
BUDGETS = {
    "edges": 160,
    "engine": 210,
    "engine/crash": 90,
    "contract": 210,
    "proof": 30,
    "servers": 30,
    "rules": 30,
    "": 70,
}
BUDGET = 40
COUNTED = {"subprocess.Popen": "starts", "os.fork": "starts", "duly.tests.database": "databases"}
NAME = pytest.StashKey[str]()

spent: Counter[str] = Counter()  # by this process
began: Counter[str] = Counter()  # what was spent when the test began
known: dict[str, Any] = {}  # wall and processor time of each test in earlier runs
costs: dict[str, dict[str, Any]] = {}
told: list[str] = []


def heard(event: str, args: tuple[Any, ...]) -> None:
    if event in COUNTED:
        spent[COUNTED[event]] += 1
    elif event == "time.sleep" and threading.current_thread() is threading.main_thread():
        spent["slept"] += args[0]


def ticks(process: Path = Path("/proc/self")) -> int:
    """Sum the processor time of a process, of its ended children and, the same way, of its running ones."""
    try:
        own = sum(map(int, (process / "stat").read_text().rpartition(")")[2].split()[11:15]))
        children = [pid for task in process.glob("task/*/children") for pid in task.read_text().split()]
    except OSError:  # it has just ended
        return 0
    return own + sum(ticks(Path("/proc", pid)) for pid in children)


def measured() -> Counter[str]:
    return Counter(spent, wall=time.monotonic(), cpu=ticks() / 100)  # type: ignore[arg-type]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--timing-out", metavar="FILE", type=Path, help="write what each test cost, as JSON")
    parser.addoption("--shuffle", metavar="SEED", help="run the tests in an order made from this seed")


def pytest_configure(config: Any) -> None:
    sys.addaudithook(heard)
    if hasattr(config, "workerinput"):
        known.update(config.workerinput["known"])
    elif cache := getattr(config, "cache", None):
        known.update(cache.get("duly/timing", {}))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["known"] = known  # the order must be the same in all workers


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        item.stash[NAME] = item.nodeid  # which gets the name of its group
    if seed := config.getoption("--shuffle"):
        random.Random(seed).shuffle(items)
    else:
        items.sort(key=lambda item: -max(LONG_S, known.get(item.nodeid, [5.0 * is_slow(item)])[0]))


def is_slow(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in ("slow", "process"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    began.clear()
    began.update(measured())
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any) -> Generator[None, Any, Any]:
    before = measured()
    made = yield
    if fixturedef.scope == "session":  # the first test does not pay for what all of them use
        began.update(measured() - before)
    return made


def pytest_assertion_pass() -> None:  # with -o enable_assertion_pass_hook=true, and no compiled tests
    spent["asserts"] += 1


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Generator[None, Any, Any]:
    report = yield
    if call.when == "teardown":
        cost = {name: round(value, 3) for name, value in (measured() - began).items()}
        marks = {"slow": is_slow(item), "nightly": item.get_closest_marker("nightly") is not None}
        report.user_properties.append(("cost", {"name": item.stash[NAME], **marks, "cpu": 0.0, **cost}))
    return report


def pytest_runtest_logreport(report: Any) -> None:
    costs.update((cost["name"], cost) for key, cost in report.user_properties if key == "cost")


def pytest_sessionfinish(session: Any) -> None:
    if hasattr(session.config, "workerinput"):
        return
    if out := session.config.getoption("--timing-out"):
        out.write_text(json.dumps(list(costs.values()), indent=0) + "\n")
    now = {name: cost["cpu"] for name, cost in costs.items()}
    over, before = excess(now), excess({name: known[name][1] for name in now if name in known})
    if over.keys() & before.keys():
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
    for name in over:
        told.append(f"{'FAILED, twice' if name in before else 'warning'}: {name}: {over[name]:.1f} s")
    if cache := getattr(session.config, "cache", None):
        cache.set("duly/timing", known | {name: [cost["wall"], cost["cpu"]] for name, cost in costs.items()})


def excess(cpu: dict[str, float]) -> dict[str, float]:
    """Return the tests that are not marked and the folders that take more processor time than they may."""
    long = {name: seconds for name, seconds in cpu.items() if seconds > MOST_CPU and not costs[name]["slow"]}
    return long | {name: sum_ for name, sum_ in sums(cpu).items() if sum_ > 1.1 * BUDGETS.get(name, BUDGET)}


def sums(cpu: dict[str, float]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for name, seconds in cpu.items():
        if costs[name]["nightly"]:  # no budget holds for these
            continue
        found["/".join(name.split("::")[0].split("/")[1:-1])] += seconds
    return found


def pytest_terminal_summary(terminalreporter: Any) -> None:
    cpu = {name: cost["cpu"] for name, cost in costs.items()}
    if len(cpu) > 100:
        terminalreporter.section("processor seconds")
        folders = sorted(sums(cpu).items(), key=lambda one: -one[1])
        told.append(", ".join(f"{name or 'tests'} {took:.0f} of {BUDGETS.get(name, BUDGET)}" for name, took in folders))
        told.extend(f"{cpu[name]:5.1f} {name}" for name in sorted(cpu, key=lambda name: -cpu[name])[:6])
    for line in told:
        terminalreporter.write_line(line)
