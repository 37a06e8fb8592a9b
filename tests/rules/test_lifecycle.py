"""The arrows and the judge: J12, J15, J23, J26, R03."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duly.model import (
    Cancelled,
    Change,
    Crashed,
    Failed,
    Failure,
    PartlyDone,
    Released,
    Snoozed,
    State,
    Succeeded,
    Waiting,
)
from duly.rules import backoff
from duly.rules.lifecycle import (
    ARROWS,
    ATTEMPTS_USED_UP,
    KILLED_ITS_WORKER,
    LOST_ON_LAST_ATTEMPT,
    NOT_RETRIED,
    Policy,
    allowed,
    decide,
    retry_after,
)

ERROR = Failure("ValueError", "no")
POLICY = Policy(backoff.exponential(first=5, jitter=0.2))
DURATIONS = st.integers(0, 10**9)
OUTCOMES = st.one_of(
    st.builds(Succeeded, st.none() | st.just("1")),
    st.builds(PartlyDone, st.just("partial: mail"), st.none()),
    st.builds(Failed, st.just(ERROR), st.booleans(), st.none() | DURATIONS),
    st.builds(Crashed, st.just(ERROR)),
    st.builds(Snoozed, DURATIONS),
    st.builds(Cancelled, st.just("no longer wanted")),
    st.builds(Waiting, st.just("approved"), st.none() | DURATIONS),
    st.just(Released()),
)


def judge(outcome, attempt=1, max_attempts=5, policy=POLICY, chance=0.0, crashes=0):
    return decide(attempt, max_attempts, outcome, policy=policy, chance=chance, crashes=crashes)


def test_j26_the_arrows_are_those_of_the_design():
    words = {str(start): {str(end) for end in ends} for start, ends in ARROWS.items()}
    assert words == {
        "None": {"scheduled", "ready"},
        "scheduled": {"ready", "running", "waiting", "cancelled"},
        "ready": {"running", "waiting", "cancelled"},
        "running": {"scheduled", "ready", "waiting", "succeeded", "partial", "dead", "cancelled"},
        "waiting": {"ready", "dead", "cancelled"},
        "succeeded": set(),
        "partial": set(),
        "dead": set(),
        "cancelled": set(),
    }


def test_j26_nothing_leaves_an_ended_state():
    assert not [(start, end) for start in State if start.ended for end in State if allowed(start, end)]


def test_j26_every_state_but_running_needs_a_claim_to_end_well():
    ways = {start for start in ARROWS if start != State.RUNNING and allowed(start, State.SUCCEEDED)}
    assert ways == set()


@given(OUTCOMES, st.integers(1, 12), st.integers(1, 12), st.floats(0, 1, exclude_max=True), st.booleans())
def test_j26_every_outcome_has_a_change_along_an_arrow_from_running(outcome, attempt, most, chance, retries):
    change = judge(outcome, attempt, most, Policy(POLICY.backoff, lambda failure: retries), chance)
    assert allowed(State.RUNNING, change.state)
    assert (change.state == State.SCHEDULED) <= (change.after_ms is not None)
    assert change.give_back_attempt == isinstance(outcome, Snoozed | Waiting | Released)
    assert (change.error is not None) == isinstance(outcome, Failed | Crashed)
    assert change.crashed == isinstance(outcome, Crashed)
    if change.state.ended:
        assert change.after_ms is None


def test_j12_a_crashed_job_is_ready_at_once_and_counted():
    assert judge(Crashed(ERROR)) == Change(State.READY, error=ERROR, crashed=True)
    assert judge(Crashed(ERROR), crashes=1).state == State.READY


def test_j12_the_third_crash_ends_the_job_dead_on_its_last_attempt_too():
    dead = Change(State.DEAD, reason=KILLED_ITS_WORKER, error=ERROR, crashed=True)
    assert judge(Crashed(ERROR), crashes=2) == dead
    assert judge(Crashed(ERROR), attempt=5, crashes=2) == dead
    assert judge(Crashed(ERROR), crashes=7) == dead


def test_j12_a_job_without_retries_still_runs_again_after_a_crash():
    assert judge(Crashed(ERROR), policy=Policy(POLICY.backoff, lambda failure: False)).state == State.READY


def test_j23_a_crash_uses_an_attempt_and_the_last_one_is_the_end():
    dead = Change(State.DEAD, reason=LOST_ON_LAST_ATTEMPT, error=ERROR, crashed=True)
    assert judge(Crashed(ERROR), attempt=5) == dead
    assert judge(Crashed(ERROR), attempt=1, max_attempts=1) == dead
    assert judge(Crashed(ERROR), attempt=7, crashes=1) == dead


def test_j15_snooze_gives_the_attempt_back():
    assert judge(Snoozed(7_000)) == Change(State.SCHEDULED, after_ms=7_000, give_back_attempt=True)


def test_j15_snooze_does_not_die_of_its_last_attempt():
    assert judge(Snoozed(0), attempt=5).state == State.SCHEDULED


def test_j15_cancel_ends_the_job_with_its_reason():
    assert judge(Cancelled("gone")) == Change(State.CANCELLED, reason="gone")


def test_j15_retry_after_a_time_overrides_backoff_shorter_or_longer():
    assert judge(Failed(ERROR, after_ms=1)).after_ms == 1
    assert judge(Failed(ERROR, after_ms=0)).after_ms == 0
    assert judge(Failed(ERROR, after_ms=10**7)).after_ms == 10**7


def test_j15_retry_after_a_time_still_counts_attempts():
    assert judge(Failed(ERROR, after_ms=1), attempt=5).state == State.DEAD


@given(st.integers(1, 30))
def test_j23_a_job_with_n_attempts_runs_n_times(most):
    runs = 1
    while judge(Failed(ERROR), runs, most).state == State.SCHEDULED:
        runs += 1
    assert runs == most


def test_j23_an_attempt_beyond_the_limit_is_dead_too():
    change = judge(Failed(ERROR), attempt=7, max_attempts=3)
    assert change == Change(State.DEAD, reason=ATTEMPTS_USED_UP, error=ERROR)


def test_r02_an_error_that_is_not_retried_is_dead_at_once():
    dead = Change(State.DEAD, reason=NOT_RETRIED, error=ERROR)
    assert judge(Failed(ERROR, retry=False)) == dead
    assert judge(Failed(ERROR, retry=False, after_ms=5)) == dead
    assert judge(Failed(ERROR), policy=Policy(POLICY.backoff, lambda failure: failure.kind == "OSError")) == dead


def test_r03_a_failure_waits_for_its_backoff():
    assert judge(Failed(ERROR), attempt=3) == Change(State.SCHEDULED, after_ms=20_000, error=ERROR)
    assert judge(Failed(ERROR), attempt=3, chance=0.5).after_ms == 18_000


@pytest.mark.parametrize(("ours", "theirs", "waits"), [(5, 9, 9), (9, 5, 9), (5, None, 5), (0, 0, 0)])
def test_r03_the_answers_retry_after_wins_when_longer(ours, theirs, waits):
    assert retry_after(ours, theirs) == waits


def test_results_and_reasons_are_passed_on():
    assert judge(Succeeded("1")) == Change(State.SUCCEEDED, result="1")
    assert judge(PartlyDone("partial: a", "2")) == Change(State.PARTIAL, reason="partial: a", result="2")
    assert judge(Released()) == Change(State.READY, give_back_attempt=True)


@pytest.mark.parametrize("timeout_ms", [None, 60_000])
def test_a_wait_ends_at_its_timeout_and_costs_no_attempt(timeout_ms):
    assert judge(Waiting("approved", timeout_ms), attempt=5) == Change(
        State.WAITING, after_ms=timeout_ms, reason="approved", give_back_attempt=True
    )
