"""Backoffs: R01 and R03."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duly.errors import ConfigError
from duly.rules import backoff

HOUR = 3_600_000
ATTEMPTS = st.integers(1, 10**12)
CHANCES = st.floats(0, 1, exclude_max=True)
GROWING = st.one_of(
    st.builds(
        backoff.exponential,
        first=st.floats(0.001, 3600),
        factor=st.floats(1, 1e300),
        jitter=st.floats(0, 1),
    ),
    st.builds(backoff.linear, st.floats(0, 3600), st.floats(0, 10**9) | st.none()),
    st.builds(backoff.fixed, st.integers(0, 3600)),
)


def test_r01_the_default_starts_at_5_s_doubles_and_stops_at_an_hour():
    usual = backoff.exponential()
    assert [usual.delay_ms(n, 0) for n in (1, 2, 3, 10, 11, 5000)] == [
        5_000,
        10_000,
        20_000,
        2_560_000,
        HOUR,
        HOUR,
    ]


def test_r01_jitter_takes_up_to_a_fifth_off():
    usual = backoff.exponential()
    assert usual.delay_ms(1, 0.5) == 4_500
    assert usual.delay_ms(1, 0.999999) == 4_000
    assert usual.delay_ms(99, 0.5) == HOUR * 0.9


def test_r01_fixed_linear_and_listed_delays():
    assert [backoff.fixed("10s").delay_ms(n, 0.5) for n in (1, 2, 9)] == [10_000] * 3
    assert [backoff.linear(5).delay_ms(n, 0.5) for n in (1, 2, 3, 10**6)] == [5_000, 10_000, 15_000, HOUR]
    assert [backoff.linear(5, "1s").delay_ms(n, 0) for n in (1, 2, 3)] == [5_000, 6_000, 7_000]
    assert [backoff.delays([60, "5m"]).delay_ms(n, 0) for n in (1, 2, 3)] == [60_000, 300_000, 300_000]


def test_r01_a_plain_list_is_a_backoff():
    assert backoff.of([1, "5m"]) == backoff.delays([1, "5m"])
    assert backoff.of((1,)) == backoff.delays([1])
    assert backoff.of(backoff.fixed(1)) == backoff.fixed(1)


@pytest.mark.parametrize("value", ["5s", 5, None, {1}, lambda attempt: 5])
def test_r01_anything_else_is_refused_with_the_choices(value):
    with pytest.raises(ConfigError, match=r"backoff\.exponential"):
        backoff.of(value)


def test_r01_a_list_allows_one_attempt_more_than_its_delays():
    assert backoff.attempts_for(backoff.of([1, 5, 30])) == 4
    assert backoff.attempts_for(backoff.exponential()) is None
    assert backoff.attempts_for(backoff.fixed(5)) is None


def test_r01_a_delay_that_can_never_be_used_is_found():
    listed = backoff.of([1, 5, 30])
    assert backoff.unused_delays(listed, 4) == ()
    assert backoff.unused_delays(listed, 3) == (30_000,)
    assert backoff.unused_delays(listed, 1) == (1_000, 5_000, 30_000)
    assert backoff.unused_delays(listed, 10) == ()
    assert backoff.unused_delays(backoff.exponential(), 1) == ()


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=8), st.integers(1, 12))
def test_r01_unused_delays_are_those_after_the_last_retry(listed, max_attempts):
    policy = backoff.of(listed)
    asked = min(max_attempts - 1, len(listed))
    assert policy.delays_ms[:asked] + backoff.unused_delays(policy, max_attempts) == policy.delays_ms
    assert backoff.unused_delays(policy, backoff.attempts_for(policy) or 0) == ()


@given(GROWING, ATTEMPTS, CHANCES)
def test_r03_backoff_is_a_pure_function_never_negative_and_never_above_its_cap(policy, attempt, chance):
    delay = policy.delay_ms(attempt, chance)
    assert isinstance(delay, int)
    assert 0 <= delay <= policy.cap_ms
    assert policy.delay_ms(attempt, chance) == delay


@given(GROWING, ATTEMPTS, ATTEMPTS)
def test_r03_delays_never_shrink_before_jitter(policy, one, other):
    early, late = sorted((one, other))
    assert policy.delay_ms(early, 0) <= policy.delay_ms(late, 0)


@given(GROWING, ATTEMPTS, CHANCES)
def test_r03_jitter_only_shortens_and_by_no_more_than_its_share(policy, attempt, chance):
    plain = policy.delay_ms(attempt, 0)
    share = getattr(policy, "jitter", 0)
    assert plain * (1 - share) - 1 <= policy.delay_ms(attempt, chance) <= plain


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: backoff.exponential(first="2h"), "cap"),
        (lambda: backoff.exponential(first=0), "first"),
        (lambda: backoff.exponential(factor=0.5), "factor"),
        (lambda: backoff.exponential(factor=float("nan")), "factor"),
        (lambda: backoff.exponential(factor=True), "factor"),
        (lambda: backoff.exponential(jitter=1.5), "jitter"),
        (lambda: backoff.exponential(jitter="much"), "jitter"),
        (lambda: backoff.linear("2h"), "cap"),
        (lambda: backoff.linear(5, -1), "step"),
        (lambda: backoff.fixed("5 parsecs"), "backoff delay"),
        (lambda: backoff.delays([]), "empty list"),
        (lambda: backoff.delays([5, "x"]), "backoff delay 2"),
    ],
)
def test_a_backoff_that_cannot_work_is_refused_by_name(make, said):
    with pytest.raises(ConfigError, match=said):
        make()
