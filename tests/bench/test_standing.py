"""The arithmetic of `make bench-peers`: ratios, the best peer, what is shown of a contestant that went wrong."""

from __future__ import annotations

import pytest

from bench.peers.measure import MEASURING, QUANTITIES, WrongRuns, check
from bench.peers.roster import CONTESTANTS, MEASURES, Contestant
from bench.peers.standing import Standing, summary, tables

OURS = Contestant("duly, async", "duly", "postgres", ("async", "kept"), "row kept")
FAST = Contestant("Fast", "fast", "postgres", (), "nothing")
SLOW = Contestant("Slow", "slow", "postgres", (), "nothing")
ON_REDIS = Contestant("Red", "red", "redis", (), "nothing")


def standing(**rates: list[float]) -> Standing:
    names = {"ours": OURS, "fast": FAST, "slow": SLOW, "red": ON_REDIS}
    found = Standing([one for name, one in names.items() if name in rates])
    for name, samples in rates.items():
        for turn, rate in enumerate(samples):
            found.add(names[name], turn, {"drain": rate})
    return found


def test_a_ratio_is_taken_within_a_repetition() -> None:
    ratio = standing(ours=[100, 50, 80], fast=[50, 50, 20]).ratio(FAST, "drain")
    assert ratio is not None
    assert list(ratio.samples) == [2, 1, 4]
    assert ratio.median == 2


def test_a_repetition_that_one_side_lacks_gives_no_ratio() -> None:
    found = standing(ours=[100, 50], fast=[50])
    ratio = found.ratio(FAST, "drain")
    assert ratio is not None
    assert list(ratio.samples) == [2]


def test_a_peer_on_redis_is_compared_with_duly_on_postgresql() -> None:
    ratio = standing(ours=[100], red=[25]).ratio(ON_REDIS, "drain")
    assert ratio is not None
    assert ratio.median == 4


def test_the_best_peer_has_the_highest_rate_and_the_lowest_cost() -> None:
    found = standing(ours=[100], fast=[50], slow=[10])
    found.add(FAST, 0, {"worker CPU": 3.0})
    found.add(SLOW, 0, {"worker CPU": 2.0})
    assert found.best_peer("postgres", "drain") is FAST
    assert found.best_peer("postgres", "worker CPU") is SLOW


def test_a_contestant_that_skips_work_is_wrong_and_its_figures_are_dropped() -> None:
    found = standing(ours=[100], fast=[50], slow=[10])
    found.add(FAST, 0, {"WAL": 1.0})
    found.fail(FAST, "c", "WRONG: 10 jobs, 9 ran")
    assert found.best_peer("postgres", "drain") is SLOW
    assert found.best_peer("postgres", "WAL") is None
    [(title, lines)] = [(title, lines) for title, lines in tables(found) if title.startswith("(c)")]
    assert "PostgreSQL" in title
    assert next(line for line in lines if line[0] == "Fast")[1:3] == ["WRONG", "WRONG"]


def test_a_later_failure_takes_back_only_what_was_measured_with_it() -> None:
    found = standing(ours=[100], fast=[50])
    found.add(FAST, 0, {"enqueue": 5.0})
    found.fail(FAST, "c", "failed: it did not end")
    assert found.spread(FAST, "enqueue") is not None
    assert found.spread(FAST, "drain") is None


def test_the_last_line_names_the_best_peer_of_each_store() -> None:
    line = summary(standing(ours=[100], fast=[50], slow=[10], red=[25]))
    assert line.startswith("summary (duly / best peer")
    assert "PostgreSQL: drain 2.00 (Fast)" in line
    assert "Redis (duly on PostgreSQL): drain 4.00 (Red)" in line


def test_without_a_peer_the_last_line_has_nothing_to_compare() -> None:
    assert summary(standing(ours=[100])).endswith("nothing to compare")


@pytest.mark.parametrize(
    ("counted", "waiting", "done"),
    [((9, 0), 0, 10), ((10, 1), 0, 10), ((10, 0), 1, 10), ((10, 0), 0, 9)],
    ids=["one never ran", "one ran twice", "one still waits", "one is not recorded"],
)
def test_a_drain_that_is_not_whole_is_refused(counted: tuple[int, int], waiting: int, done: int) -> None:
    with pytest.raises(WrongRuns):
        check(10, counted, {"waiting": waiting, "done": done})


def test_a_peer_that_records_nothing_is_whole_when_every_job_ran_once() -> None:
    check(10, (10, 0), {"waiting": 0, "done": None})


def test_every_quantity_has_a_table_and_every_table_a_measurement() -> None:
    assert {quantity.measure for quantity in QUANTITIES.values()} == set(MEASURES)
    assert set(MEASURING) == set(MEASURES) - {"f"}


def test_every_contestant_has_a_unique_name_and_its_retention() -> None:
    assert len({one.key for one in CONTESTANTS}) == len(CONTESTANTS)
    assert all(one.keep and one.durability for one in CONTESTANTS)
