"""When a schedule is due: cron expressions and intervals."""

from __future__ import annotations

import io
import re
import struct
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import combinations, islice, pairwise, takewhile
from time import process_time
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import pytest
from cronsim.cronsim import Field
from hypothesis import given, settings
from hypothesis import strategies as st

from duly.errors import ConfigError
from duly.rules import timing as schedule
from duly.rules.timing import Mode, Run, due_between, explain, next_after, occurrences, timing
from tests import schedule_judge as judge

HOUR = 3_600_000
YEARS = (datetime(2024, 1, 1), datetime(2031, 1, 1))


def ms(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1_000)


def said(at: int) -> str:
    return datetime.fromtimestamp(at / 1_000, UTC).strftime("%Y-%m-%d %H:%M")


def following(when, after: str, *, tz: str = "UTC", n: int = 3) -> list[str]:
    return [said(at) for at in islice(occurrences(timing(when, tz=tz), ms(after)), n)]


@pytest.mark.parametrize(
    ("when", "tz", "after", "dues"),
    [
        ("* * * * *", "UTC", "2026-01-01 00:00", ["2026-01-01 00:01", "2026-01-01 00:02", "2026-01-01 00:03"]),
        ("*/20 * * * *", "UTC", "2026-01-01 00:00", ["2026-01-01 00:20", "2026-01-01 00:40", "2026-01-01 01:00"]),
        ("5/20 * * * *", "UTC", "2026-01-01 00:00", ["2026-01-01 00:05", "2026-01-01 00:25", "2026-01-01 00:45"]),
        ("*/60 */24 * * *", "UTC", "2026-01-01 00:00", ["2026-01-02 00:00", "2026-01-03 00:00", "2026-01-04 00:00"]),
        ("10-30/10 3 * * *", "UTC", "2026-01-01 00:00", ["2026-01-01 03:10", "2026-01-01 03:20", "2026-01-01 03:30"]),
        ("0 9 * * mon-fri", "UTC", "2026-01-01 09:00", ["2026-01-02 09:00", "2026-01-05 09:00", "2026-01-06 09:00"]),
        ("0 9 * * MON,3", "UTC", "2026-01-01 09:00", ["2026-01-05 09:00", "2026-01-07 09:00", "2026-01-12 09:00"]),
        ("0 9 * * 7", "UTC", "2026-01-01 09:00", ["2026-01-04 09:00", "2026-01-11 09:00", "2026-01-18 09:00"]),
        ("0 0 1 jan,Jul *", "UTC", "2026-01-01 00:00", ["2026-07-01 00:00", "2027-01-01 00:00", "2027-07-01 00:00"]),
        ("0 0 31 * *", "UTC", "2026-01-31 00:00", ["2026-03-31 00:00", "2026-05-31 00:00", "2026-07-31 00:00"]),
        ("0 0 29 2 *", "UTC", "2026-01-01 00:00", ["2028-02-29 00:00", "2032-02-29 00:00", "2036-02-29 00:00"]),
        ("0 0 29 2 *", "UTC", "2096-03-01 00:00", ["2104-02-29 00:00", "2108-02-29 00:00", "2112-02-29 00:00"]),
        ("0 0 13 * 5", "UTC", "2026-01-01 00:00", ["2026-01-02 00:00", "2026-01-09 00:00", "2026-01-13 00:00"]),
        ("0 0 */13 * 5", "UTC", "2026-01-01 00:00", ["2026-02-27 00:00", "2026-03-27 00:00", "2026-05-01 00:00"]),
        ("0 0 L * *", "UTC", "2026-01-31 00:00", ["2026-02-28 00:00", "2026-03-31 00:00", "2026-04-30 00:00"]),
        ("0 0 LW * *", "UTC", "2026-01-30 00:00", ["2026-02-27 00:00", "2026-03-31 00:00", "2026-04-30 00:00"]),
        ("0 0 * * 5L", "UTC", "2026-01-01 00:00", ["2026-01-30 00:00", "2026-02-27 00:00", "2026-03-27 00:00"]),
        ("0 0 * * mon#2", "UTC", "2026-01-01 00:00", ["2026-01-12 00:00", "2026-02-09 00:00", "2026-03-09 00:00"]),
        (
            "0 9 * * *",
            "Europe/Vienna",
            "2026-03-27 12:00",
            ["2026-03-28 08:00", "2026-03-29 07:00", "2026-03-30 07:00"],
        ),
        (
            "0 9 * * *",
            "America/New_York",
            "2026-03-06 20:00",
            ["2026-03-07 14:00", "2026-03-08 13:00", "2026-03-09 13:00"],
        ),
        (
            "0 9 * * *",
            "Asia/Kathmandu",
            "2026-01-01 00:00",
            ["2026-01-01 03:15", "2026-01-02 03:15", "2026-01-03 03:15"],
        ),
        (
            "0 0 1 * *",
            "Pacific/Kiritimati",
            "2026-01-01 00:00",
            ["2026-01-31 10:00", "2026-02-28 10:00", "2026-03-31 10:00"],
        ),
        (
            "0 0 1 6 *",
            "Pacific/Kiritimati",
            "2026-01-01 00:00",
            ["2026-05-31 10:00", "2027-05-31 10:00", "2028-05-31 10:00"],
        ),
        (
            "59 23 31 5 *",
            "Pacific/Niue",
            "2026-01-01 00:00",
            ["2026-06-01 10:59", "2027-06-01 10:59", "2028-06-01 10:59"],
        ),
        (
            "0 0 1 * *",
            "Pacific/Niue",
            "2026-01-01 00:00",
            ["2026-01-01 11:00", "2026-02-01 11:00", "2026-03-01 11:00"],
        ),
    ],
)
def test_s01_an_expression_has_these_three_due_times_next(when, tz, after, dues):
    assert following(when, after, tz=tz) == dues


@pytest.mark.parametrize(
    ("alias", "dues"),
    [
        ("@hourly", ["2026-01-01 01:00", "2026-01-01 02:00"]),
        ("@daily", ["2026-01-02 00:00", "2026-01-03 00:00"]),
        ("@midnight", ["2026-01-02 00:00", "2026-01-03 00:00"]),
        ("@weekly", ["2026-01-04 00:00", "2026-01-11 00:00"]),
        ("@monthly", ["2026-02-01 00:00", "2026-03-01 00:00"]),
        ("@yearly", ["2027-01-01 00:00", "2028-01-01 00:00"]),
        ("@Annually", ["2027-01-01 00:00", "2028-01-01 00:00"]),
    ],
)
def test_s01_an_alias_stands_for_its_expression(alias, dues):
    assert following(alias, "2026-01-01 00:00", n=2) == dues
    assert timing(alias).spec == alias


@pytest.mark.parametrize(
    ("when", "words"),
    [
        ("", ["empty"]),
        (" \n", ["empty"]),
        ("0 9 * *", ["4 fields", "not 5", "day of week"]),
        ("0", ["100ms"]),
        ("daily", ["1 field,"]),
        ("every 5 minutes", ["3 fields"]),
        ("0 0 9 * * *", ["6 fields", "seconds", 'every("10s")']),
        ("60 * * * *", ["field 1, minute: '60' is not 0-59"]),
        ("0 25 * * *", ["field 2, hour: '25' is not 0-23"]),
        ("0 1,2,24 * * *", ["hour: '24' is not 0-23"]),
        ("0 0 0 * *", ["field 3, day of month: '0' is not 1-31"]),
        ("0 0 1 13 *", ["field 4, month: '13' is not 1-12 or jan-dec"]),
        ("0 0 1 jam *", ["month: 'jam'"]),
        ("0 0 * * 8", ["field 5, day of week: '8' is not 0-7 or sun-sat"]),
        ("0 0 * * mo", ["day of week: 'mo'"]),
        ("0 0 * * mon#6", ["day of week: 'mon#6'"]),
        ("0 0 ? * *", ["day of month: '?'", "write *"]),
        ("5-1-3 * * * *", ["minute: '5-1-3' is no value, range or step"]),
        ("0 1,22-2 * * *", ["field 2, hour: '22-2' ends before it begins: write 22,23,0-2"]),
        ("0 9 * * mon-sun", ["'mon-sun' ends before it begins: write *"]),
        ("0 9 * * SAT-SUN", ["'SAT-SUN' ends before it begins: write sat,sun"]),
        ("0 9 * * fri-mon/2", ["write fri,sun"]),
        ("0 9 * * 7-2", ["write 0-2"]),
        ("0 9 * nov-feb *", ["write nov,dec,jan,feb"]),
        ("0 9 * * sat-mo", ["'sat-mo' is no value, range or step of 0-7 or sun-sat"]),
        ("*/0 * * * *", ["minute: '*/0'"]),
        ("1,,2 * * * *", ["minute: ''"]),
        ("0 0 30 2 *", ["never fires: no day fits field 3, day of month '30' and field 4, month '2'"]),
        ("0 0 31 4,6,9,11 *", ["never fires", "field 3, day of month '31' and field 4, month '4,6,9,11'"]),
        ("0 0 */30 2 mon#2", ["never fires", "field 3,", "field 4,", "and field 5, day of week 'mon#2'"]),
        ("@reboot", ["@reboot", "@hourly", "@annually"]),
        ("5 minutes", ["interval", "did you mean 'm'"]),
        ("-5m", ["negative"]),
        ("0s", ["at least 100ms"]),
        (0, ["at least 100ms"]),
        (-1, ["negative"]),
        ("99ms", ["99ms", "at least 100ms"]),
        (timedelta(days=3_654), ["at most 10 years"]),
        (True, ["not a duration"]),
        (float("nan"), ["nan"]),
        (["10m"], ["list"]),
        (None, ["nothing"]),
        ("* " * 5_000, ["10,000 characters", "at most 1,000"]),
    ],
)
def test_s01_a_wrong_time_is_refused_with_the_reason(when, words):
    with pytest.raises(ConfigError) as refused:
        timing(when)
    assert [word for word in words if word not in str(refused.value)] == []
    assert str(refused.value).startswith("schedule ")
    assert len(str(refused.value)) < 250


@pytest.mark.parametrize(
    ("when", "instead", "interval"),
    [
        ("*/70 * * * *", "0 * * * *", "70m"),
        ("5/90 * * * *", "5 * * * *", "90m"),
        ("0 */25 * * *", "0 0 * * *", "25h"),
        ("0 9 */32 * *", "0 9 1 * *", "32d"),
        ("0 9 1 mar-may/13 *", "0 9 1 mar *", None),
        ("0 9 * * 1-5/8", "0 9 * * 1", None),
    ],
)
def test_s01_a_step_that_is_longer_than_its_field_is_refused_with_what_it_is_due_at(when, instead, interval):
    with pytest.raises(ConfigError, match=r"has a step above .* only: write ") as refused:
        timing(when)
    value, _, every = str(refused.value).rpartition(": write ")[2].partition(", or ")
    assert value in instead.split()
    assert every == ("" if interval is None else f'every("{interval}")')
    assert timing(instead)
    assert interval is None or timing(interval)
    timing("*/60 */24 */31 */12 */7")


@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize("step", ["", "/2", "/5"])
@pytest.mark.slow
def test_s01_what_to_write_for_a_range_around_the_end_is_accepted_and_due_then(place, step):
    low, high = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 6))[place]
    for begin, end in combinations(range(low, high + 1), 2):
        fields = ["*"] * 5
        fields[place] = f"{end}-{begin}{step}"
        with pytest.raises(ConfigError) as refused:
            timing(" ".join(fields))
        fields[place] = str(refused.value).rpartition(": write ")[2]
        timing(" ".join(fields))
        ring = [*range(end, high + 1), *range(low, begin + 1)][:: int(step[1:] or 1)]
        assert Field(place + 1).parse(fields[place]) - ({7} if place == 4 else set()) == set(ring)


def test_s01_both_day_fields_must_match_if_one_begins_with_a_star():
    """As in Debian's cron. Friday the 13th, and every second day of the month that is a Friday."""
    assert following("0 0 13 * fri", "2026-02-01T00:00", n=2) == ["2026-02-06 00:00", "2026-02-13 00:00"]
    assert following("0 0 13 * */5", "2026-02-01T00:00", n=2) == ["2026-02-13 00:00", "2026-03-13 00:00"]
    assert following("0 0 */2 * fri", "2026-02-01T00:00", n=2) == ["2026-02-13 00:00", "2026-02-27 00:00"]


def test_s01_a_time_always_in_the_gap_of_its_zone_never_fires():
    timing("*/5 2 * 3 0L")
    with pytest.raises(ConfigError, match=r"never fires: no day fits field 2, hour '2' and .* in Europe/Vienna"):
        timing("*/5 2 * 3 0L", tz="Europe/Vienna")


@pytest.mark.parametrize(
    ("tz", "words"),
    [
        ("Europe/Viena", "did you mean 'Europe/Vienna'?"),
        ("europe/vienna", "did you mean 'Europe/Vienna'?"),
        ("new york", "did you mean 'America/New_York'?"),
        ("Nowhere/At_All", "IANA name"),
        ("", "IANA name"),
        ("Europe", "no zone"),
        ("../etc/passwd", "no zone"),
        ("/etc/localtime", "no zone"),
        ("localtime", "no zone"),
        ("right/Europe/Vienna", "no zone"),
        ("Europe/Vienna\0", "no zone"),
        ("x" * 10_000, "no zone"),
        (None, "NoneType"),
        (UTC, "timezone"),
    ],
)
def test_s01_a_wrong_zone_is_refused_with_the_reason(tz, words):
    with pytest.raises(ConfigError) as refused:
        timing("0 9 * * *", tz=tz)
    assert words in str(refused.value)
    assert len(str(refused.value)) < 250


def test_s01_utc_needs_no_zone_data_and_other_zones_raise_with_the_package(monkeypatch):
    def missing(name):
        raise ZoneInfoNotFoundError(name)

    monkeypatch.setattr("duly.rules.days.available_timezones", set)
    monkeypatch.setattr("duly.rules.days.ZoneInfo", missing)
    assert next_after(timing("0 9 * * *"), ms("2026-01-01")) == ms("2026-01-01 09:00")
    with pytest.raises(ConfigError, match="pip install tzdata"):
        timing("0 9 * * *", tz="Europe/Vienna")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"when": "10m", "mode": "cron"}, "'rate' or 'delay'"),
        ({"when": "10m", "mode": "Rate"}, "'rate' or 'delay'"),
        ({"when": "10m", "mode": 5}, "'rate' or 'delay'"),
        ({"when": "0 9 * * *", "mode": "rate"}, "takes no mode"),
        ({"rrule": "FREQ=DAILY", "mode": "delay"}, "takes no mode"),
        ({"rrule": "FREQ=DAILY", "when": "10m"}, "both"),
        ({}, "nothing"),
    ],
)
def test_s01_a_wrong_mode_or_mixture_is_refused(given, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        timing(**given)


CRON_LETTERS = st.text("0123456789*/-,#LW? @monfriabc", max_size=30)


@given(st.text(max_size=40) | CRON_LETTERS | st.lists(CRON_LETTERS, min_size=5, max_size=5).map(" ".join))
def test_s01_any_text_is_accepted_or_refused_and_accepted_ones_can_be_explained(text):
    with suppress(ConfigError):
        taken = timing(text)
        assert next_after(taken, ms("2026-01-01")) is not None
        assert explain(taken)


@pytest.mark.parametrize(
    ("when", "tz", "after", "dues"),
    [
        # The gap: at the first instant after it, once, however many times lie in it.
        ("30 2 * * *", "Europe/Vienna", "2026-03-28 12:00", ["2026-03-29 01:00", "2026-03-30 00:30"]),
        ("0,15,30 2 * * *", "Europe/Vienna", "2026-03-28 12:00", ["2026-03-29 01:00", "2026-03-30 00:00"]),
        ("0,30 2,3 * * *", "Europe/Vienna", "2026-03-28 12:00", ["2026-03-29 01:00", "2026-03-29 01:30"]),
        ("15 2 * * *", "Australia/Lord_Howe", "2026-10-03 00:00", ["2026-10-03 15:30", "2026-10-04 15:15"]),
        ("30 0 * * *", "Africa/Cairo", "2026-04-23 12:00", ["2026-04-23 22:00", "2026-04-24 21:30"]),
        ("30 1 * * *", "Antarctica/Troll", "2026-03-28 12:00", ["2026-03-29 01:00", "2026-03-29 23:30"]),
        ("0 9 * * *", "Pacific/Apia", "2011-12-29 20:00", ["2011-12-30 10:00", "2011-12-30 19:00"]),
        ("0 0 30 12 *", "Pacific/Apia", "2011-01-01 00:00", ["2011-12-30 10:00", "2012-12-29 10:00"]),
        # A time that is repeated: the first.
        ("30 2 * * *", "Europe/Vienna", "2026-10-24 12:00", ["2026-10-25 00:30", "2026-10-26 01:30"]),
        ("45 1 * * *", "Australia/Lord_Howe", "2026-04-04 00:00", ["2026-04-04 14:45", "2026-04-05 15:15"]),
        ("30 23 * * *", "Africa/Cairo", "2026-10-29 12:00", ["2026-10-29 20:30", "2026-10-30 21:30"]),
        # Elapsed time: nothing in the gap, both passes.
        ("*/30 2 * * *", "Europe/Vienna", "2026-03-28 12:00", ["2026-03-30 00:00", "2026-03-30 00:30"]),
        ("30 * * * *", "Europe/Vienna", "2026-03-29 00:00", ["2026-03-29 00:30", "2026-03-29 01:30"]),
        ("30 * * * *", "Europe/Vienna", "2026-10-25 00:00", ["2026-10-25 00:30", "2026-10-25 01:30"]),
        ("*/30 2 * * *", "Europe/Vienna", "2026-10-25 00:15", ["2026-10-25 00:30", "2026-10-25 01:00"]),
        ("0 */6 * * *", "Africa/Cairo", "2026-04-23 21:00", ["2026-04-24 03:00", "2026-04-24 09:00"]),
        ("* 2 * * *", "Australia/Lord_Howe", "2026-04-04 15:29", ["2026-04-04 15:30", "2026-04-04 15:31"]),
        # Saint John's changed its clock at 00:01 until 2011, so that two days were shown in turns.
        ("*/1 0 * * *", "America/St_Johns", "2010-11-07 02:29", ["2010-11-07 02:30", "2010-11-07 03:30"]),
    ],
)
def test_s02_around_a_change_of_the_clock(when, tz, after, dues):
    assert following(when, after, tz=tz, n=2) == dues


def test_s02_from_the_second_pass_on_a_repeated_fixed_time_is_over():
    fixed = timing("30 2 * * *", tz="Europe/Vienna")
    assert said(next_after(fixed, ms("2026-10-25 01:10"))) == "2026-10-26 01:30"


@pytest.mark.parametrize("minute_and_hour", ["0 0-23", "0-59 1"])
def test_s02_a_field_is_wildcard_only_if_it_begins_with_a_star(minute_and_hour):
    fixed, wildcard = f"{minute_and_hour} * * *", f"{minute_and_hour} * * *".replace("0-23", "*").replace("0-59", "*")
    window = (ms("2026-10-25 00:00") - 1, ms("2026-10-25 02:30"))
    tz = "Europe/Vienna" if "0-23" in fixed else "Europe/London"
    counted = [
        sum(1 for _ in takewhile(lambda at: at < window[1], occurrences(timing(each, tz=tz), window[0])))
        for each in (fixed, wildcard)
    ]
    assert counted[0] < counted[1]


EXPRESSIONS = [
    "* * * * *",
    "*/15 * * * *",
    "0 * * * *",
    "15 */2 * * *",
    "*/20 1-2 * * *",
    "*/7 0 * * *",
    "30 2 * * *",
    "0 0 * * *",
    "59 23 * * *",
    "0,30 0-3 * * *",
    "5 0 * * mon-fri",
    "30 2 * * sun",
    "0 0-23 * * *",
    "45 1,2,3 * 3,4,9-11 *",
]
ZONES = [
    "Europe/Vienna",
    "Europe/London",
    "America/New_York",
    "America/St_Johns",
    "America/Havana",
    "America/Santiago",
    "Atlantic/Azores",
    "Africa/Cairo",
    "Africa/Casablanca",
    "Antarctica/Troll",
    "Asia/Beirut",
    "Australia/Lord_Howe",
    "Pacific/Chatham",
    "Asia/Kathmandu",
]


def against_the_judge(tz: str, change: int) -> None:
    begin, end = change - judge.DAY, change + judge.DAY + 300
    table = judge.minutes(tz, begin, end)
    for expression in EXPRESSIONS:
        walked = occurrences(timing(expression, tz=tz), begin * 60_000 - 1)
        found = list(takewhile(lambda at: at < end * 60_000, walked))
        assert found == judge.due(expression, table), (expression, tz, said(change * 60_000))


@pytest.mark.parametrize("tz", ZONES)
@pytest.mark.slow
def test_s02_every_change_of_seven_years_matches_brute_force(tz):
    changes = judge.changes(tz, *YEARS)
    assert bool(changes) == (tz != "Asia/Kathmandu")
    for change in changes or [judge._minute(YEARS[0])]:
        against_the_judge(tz, change)


@pytest.mark.parametrize(
    ("tz", "year"),
    [("Pacific/Apia", 2011), ("America/St_Johns", 2010), ("Asia/Pyongyang", 2015), ("America/Caracas", 2016)],
)
def test_s02_odd_changes_of_the_past_match_brute_force(tz, year):
    changes = judge.changes(tz, datetime(year, 1, 1), datetime(year + 1, 1, 1))
    assert changes
    for change in changes:
        against_the_judge(tz, change)


def test_s02_a_repeated_hour_across_midnight_of_utc_is_still_repeated(monkeypatch):
    # No zone has had this since 1970, but the walk goes by days of UTC: here 23:30 to 00:30 of UTC is repeated.
    made = made_up_zone("<A>0<B>-1,M3.5.0/0,M10.5.0/0:30")
    monkeypatch.setattr("duly.rules.cron.zone", lambda name: made)
    schedule._almanac.cache_clear()
    assert following("15 0 * * *", "2026-10-24 12:00", n=2) == ["2026-10-24 23:15", "2026-10-26 00:15"]
    assert following("*/30 0 * * *", "2026-10-24 23:29", n=2) == ["2026-10-25 00:00", "2026-10-25 00:30"]
    schedule._almanac.cache_clear()


def made_up_zone(rule: str) -> ZoneInfo:
    head = b"TZif2" + bytes(15) + struct.pack(">6l", 0, 0, 0, 0, 1, 2) + bytes(6) + b"A\0"
    return ZoneInfo.from_file(io.BytesIO(head + head + f"\n{rule}\n".encode()))


@pytest.mark.parametrize("when", ["10m", 600, 600.0, timedelta(minutes=10), "600"])
def test_s03_an_interval_may_be_written_in_every_form_of_a_duration(when):
    assert timing(when).interval_ms == 600_000
    assert timing(when).mode is Mode.RATE
    assert timing(when, mode="delay").mode is Mode.DELAY
    assert timing("1d 2h 3m 4s 5ms").interval_ms == 93_784_005


@given(first=st.integers(0, 2**42), interval=st.integers(100, 10**9))
def test_s03_a_rate_never_drifts_over_ten_thousand_runs(first, interval):
    rate = timing(timedelta(milliseconds=interval))
    run = due_between(rate, first, first + 9_999 * interval + interval // 2, limit=10**6)
    assert run == Run(10_000, first + 9_999 * interval, first + 10_000 * interval)
    walked = list(islice(occurrences(rate, first), 100))
    assert walked == [first + n * interval for n in range(1, 101)]
    assert next_after(rate, first) == first + interval


def test_s03_a_rate_counts_a_century_of_misses_at_once():
    rate, begin = timing("100ms"), process_time()
    assert due_between(rate, 0, 3_155_760_000_000, limit=2**62).count == 31_557_600_001
    assert process_time() - begin < 0.1


def test_s03_a_delay_counts_from_the_end_of_the_run():
    delay = timing("10m", mode="delay")
    assert next_after(delay, 5) == 600_005
    # However late it is looked at, one run is due, and when the next is nobody can know yet.
    assert due_between(delay, 0, 86_400_000, limit=100) == Run(1, 0, None)


expressions = st.sampled_from([*EXPRESSIONS, "0 9 1 * *", "0 0 29 2 *", "30 2 * * 0L"])
instants = st.integers(ms("2024-01-01"), ms("2031-01-01"))


@settings(deadline=None)
@given(expressions, st.sampled_from(ZONES), instants)
def test_s01_due_times_increase_and_are_those_of_asking_again_and_again(expression, tz, at):
    cron = timing(expression, tz=tz)
    walked = list(islice(occurrences(cron, at), 20))
    assert all(before < after for before, after in pairwise([at, *walked]))
    assert [next_after(cron, before) for before in [at, *walked[:-1]]] == walked
    assert next_after(cron, walked[0] - 1) == walked[0]


@settings(deadline=None)
@given(expressions, st.sampled_from(ZONES), instants, st.integers(0, 40 * 24 * HOUR), st.integers(1, 300))
def test_s04_due_times_between_are_those_counted_by_hand(expression, tz, at, length, limit):
    cron = timing(expression, tz=tz)
    first = next_after(cron, at)
    until = first + length
    by_hand = [first, *islice(takewhile(lambda due: due <= until, occurrences(cron, first)), limit - 1)]
    run = due_between(cron, first, until, limit=limit)
    assert run == Run(len(by_hand), by_hand[-1], next_after(cron, by_hand[-1]))


@pytest.mark.parametrize("when", ["0 9 * * *", "1d"])
def test_s04_a_due_time_at_the_very_end_is_counted(when):
    first, second, third = (ms(f"2026-01-0{day} 09:00") for day in (1, 2, 3))
    assert due_between(timing(when), first, second, limit=9) == Run(2, second, third)
    assert due_between(timing(when), first, second - 1, limit=9) == Run(1, first, second)
    assert due_between(timing(when), first, third, limit=2) == Run(2, second, third)


def test_s04_nothing_is_due_before_the_first():
    assert due_between(timing("0 9 * * *"), 1_000, 999, limit=5) == Run(0, 1_000, 1_000)
    assert due_between(timing("10m"), 1_000, 999, limit=5) == Run(0, 1_000, 1_000)


@given(expressions.filter(lambda text: "L" not in text), st.sampled_from(ZONES), instants)
def test_s01_a_due_time_matches_its_fields_or_is_directly_after_a_gap(expression, tz, at):
    wanted, zone = judge.fields(expression), ZoneInfo(tz)
    for due in islice(occurrences(timing(expression, tz=tz), at), 5):
        local = datetime.fromtimestamp(due / 1_000, zone)
        shown = int(local.replace(tzinfo=UTC).timestamp()) // 60
        before = datetime.fromtimestamp(due / 1_000 - 60, zone).replace(tzinfo=None)
        in_gap = wanted.fixed and local.replace(tzinfo=None) - before > timedelta(minutes=1)
        assert wanted.on(shown) or in_gap


@pytest.mark.parametrize("at", [-(2**62), -(10**14), 253_402_300_800_000, 2**62])
def test_s01_a_time_beyond_the_calendar_has_an_answer(at):
    cron = timing("0 9 * * *", tz="Pacific/Kiritimati")
    due = next_after(cron, at)
    assert due is None if at > 0 else due > at


@pytest.mark.parametrize(
    ("when", "tz", "mode", "words"),
    [
        ("0 9 * * mon-fri", "Europe/Vienna", None, "at 09:00 on Monday to Friday, Europe/Vienna"),
        ("@daily", "UTC", None, "at 00:00 every day, UTC"),
        ("*/5 * * * *", "UTC", None, "every fifth minute of every hour, UTC"),
        ("10m", "UTC", None, "every 10 minutes"),
        ("1h", "UTC", None, "every hour"),
        ("1h30m", "UTC", None, "every 1 hour 30 minutes"),
        ("250ms", "UTC", None, "every 250 milliseconds"),
        ("10m", "UTC", "delay", "10 minutes after the end of the last run"),
        ("1d", "UTC", "delay", "1 day after the end of the last run"),
    ],
)
def test_s08_a_schedule_is_explained_in_plain_english(when, tz, mode, words):
    assert explain(timing(when, tz=tz, mode=mode)) == words


@pytest.mark.parametrize("expression", ["* * * * *", "*/5 * * * *", "0 9 * * *", "0 9 * * mon-fri"])
@pytest.mark.parametrize("tz", ["UTC", "Europe/Vienna"])
def test_s05_a_thousand_missed_times_are_counted_in_no_time(expression, tz):
    cron = timing(expression, tz=tz)
    first = next_after(cron, ms("2026-01-01"))
    spent = []
    for _ in range(5):
        schedule._almanac.cache_clear()
        begin = process_time()
        assert due_between(cron, first, 2**43, limit=1_000).count == 1_000
        spent.append(process_time() - begin)
    # A tenth of this as measured; the room is for a busy machine.
    assert min(spent) < 0.1
