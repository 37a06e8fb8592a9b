"""Durations as people write them."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duly.errors import ConfigError
from duly.rules.durations import LONGEST_MS, describe, to_ms


@pytest.mark.parametrize(
    ("value", "ms"),
    [
        ("5m", 300_000),
        ("1h30m", 5_400_000),
        ("1h 30m", 5_400_000),
        (" 250ms ", 250),
        ("1.5s", 1_500),
        ("2w", 1_209_600_000),
        ("90", 90_000),
        ("0.25", 250),
        (5, 5_000),
        (0.25, 250),
        (0, 0),
        ("0s", 0),
        (0.0001, 1),
        ("0.0001ms", 1),
        (timedelta(hours=1, milliseconds=1), 3_600_001),
        (timedelta(microseconds=1), 1),
        (timedelta(), 0),
    ],
)
def test_every_public_form_gives_whole_milliseconds(value, ms):
    assert to_ms(value) == ms


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("", "empty"),
        ("   ", "empty"),
        (-1, "negative"),
        ("-5m", "negative"),
        (timedelta(seconds=-1), "negative"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (True, "True"),
        (None, "NoneType"),
        ([5], "list"),
        ("5 minutes", "did you mean 'm'"),
        ("5S", "did you mean 's'"),
        ("3millis", "did you mean 'ms'"),
        ("2 hours", "did you mean 'h'"),
        ("1month", "the units are w d h m s ms"),
        ("5x", "'x' is no unit"),
        ("soon", "not a duration"),
        ("5m!", "not a duration"),
        ("m5", "not a duration"),
        ("5m -1s", "not a duration"),
        ("101y", "no unit"),
        (10**400, "100 years"),
        ("9" * 400 + "s", "100 years"),
        ("9" * 400, "100 years"),
        (1e300, "100 years"),
        (timedelta.max, "100 years"),
        ("x" * 10_000, "…"),
    ],
)
def test_a_wrong_duration_is_refused_with_its_name_and_the_remedy(value, said):
    with pytest.raises(ConfigError) as refused:
        to_ms(value, what="lease")
    assert str(refused.value).startswith("lease ")
    assert said in str(refused.value)
    assert len(str(refused.value)) < 250


def test_months_are_not_taken_for_minutes_nor_milliseconds():
    with pytest.raises(ConfigError) as refused:
        to_ms("1mon")
    assert "did you mean" not in str(refused.value)


@pytest.mark.parametrize(
    ("ms", "said"),
    [
        (0, "0s"),
        (250, "250ms"),
        (5_400_000, "1h 30m"),
        (90_061_001, "1d 1h 1m 1s 1ms"),
        (864_000_000, "10d"),
    ],
)
def test_durations_are_written_for_people(ms, said):
    assert describe(ms) == said


@given(st.integers(0, LONGEST_MS))
def test_a_written_duration_parses_to_the_same_value(ms):
    assert to_ms(describe(ms)) == ms
    assert to_ms(timedelta(milliseconds=ms)) == ms


@given(st.text(max_size=20) | st.floats() | st.integers())
def test_anything_gives_milliseconds_in_range_or_a_config_error(value):
    with suppress(ConfigError):
        assert 0 <= to_ms(value) <= LONGEST_MS
