"""When a schedule is due: RRULE. python-dateutil is the judge here; it is not what duly walks with."""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import islice, takewhile
from time import process_time

import msgspec
import pytest
from dateutil.rrule import rrulestr
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from duly.errors import ConfigError
from duly.rules.timing import Mode, Run, due_between, explain, next_after, occurrences, timing

WEEKDAYS = ["MO", "TU", "WE", "TH", "FR", "SA", "SU"]


def ms(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1_000)


def said(at: int) -> str:
    return datetime.fromtimestamp(at / 1_000, UTC).strftime("%Y-%m-%d %H:%M")


def following(rule: str, after: str, *, tz: str = "UTC", n: int = 3) -> list[str]:
    return [said(at) for at in islice(occurrences(timing(rrule=rule, tz=tz), ms(after)), n)]


@pytest.mark.parametrize(
    ("rule", "tz", "dues"),
    [
        ("FREQ=DAILY", "UTC", ["2026-03-29 00:00", "2026-03-30 00:00", "2026-03-31 00:00"]),
        ("RRULE:freq=weekly;byday=mo;byhour=9", "UTC", ["2026-03-30 09:00", "2026-04-06 09:00", "2026-04-13 09:00"]),
        ("FREQ=WEEKLY", "UTC", ["2026-03-30 00:00", "2026-04-06 00:00", "2026-04-13 00:00"]),
        ("FREQ=MONTHLY;BYDAY=-1FR", "UTC", ["2026-04-24 00:00", "2026-05-29 00:00", "2026-06-26 00:00"]),
        (
            "FREQ=MONTHLY;BYDAY=MO,TU,WE,TH,FR;BYSETPOS=-1",
            "UTC",
            ["2026-03-31 00:00", "2026-04-30 00:00", "2026-05-29 00:00"],
        ),
        ("FREQ=YEARLY;BYDAY=20MO", "UTC", ["2026-05-18 00:00", "2027-05-17 00:00", "2028-05-15 00:00"]),
        ("FREQ=MONTHLY;BYDAY=MO,1TU", "UTC", ["2026-03-30 00:00", "2026-04-06 00:00", "2026-04-07 00:00"]),
        ("FREQ=HOURLY;INTERVAL=6;BYMINUTE=0,30", "UTC", ["2026-03-28 12:30", "2026-03-28 18:00", "2026-03-28 18:30"]),
        # Daylight saving: fixed times once, at the first instant after the gap; hours and less by elapsed time.
        (
            "FREQ=DAILY;BYHOUR=2;BYMINUTE=30",
            "Europe/Vienna",
            ["2026-03-29 01:00", "2026-03-30 00:30", "2026-03-31 00:30"],
        ),
        ("FREQ=HOURLY;BYHOUR=1,2,3", "Europe/Vienna", ["2026-03-29 00:00", "2026-03-29 01:00", "2026-03-29 23:00"]),
        # A start with a zone of its own.
        (
            "DTSTART;TZID=America/New_York:20260301T090000\nRRULE:FREQ=DAILY",
            "Europe/Vienna",
            ["2026-03-28 13:00", "2026-03-29 13:00", "2026-03-30 13:00"],
        ),
        (
            "DTSTART:20260301T090000Z RRULE:FREQ=DAILY",
            "Europe/Vienna",
            ["2026-03-29 09:00", "2026-03-30 09:00", "2026-03-31 09:00"],
        ),
        (
            "DTSTART:20260301T090000 RRULE:FREQ=DAILY",
            "Europe/Vienna",
            ["2026-03-29 07:00", "2026-03-30 07:00", "2026-03-31 07:00"],
        ),
        ("DTSTART;VALUE=DATE:20260401 FREQ=DAILY", "UTC", ["2026-04-01 00:00", "2026-04-02 00:00", "2026-04-03 00:00"]),
        # More lines: another rule, dates to add and dates to leave out.
        (
            "DTSTART:20260101T090000 RRULE:FREQ=WEEKLY;BYDAY=MO RRULE:FREQ=WEEKLY;BYDAY=TU EXDATE:20260330T090000",
            "UTC",
            ["2026-03-31 09:00", "2026-04-06 09:00", "2026-04-07 09:00"],
        ),
        (
            "DTSTART:20260101T090000 RRULE:FREQ=MONTHLY RDATE:20260329T100000Z",
            "Europe/Vienna",
            ["2026-03-29 10:00", "2026-04-01 07:00", "2026-05-01 07:00"],
        ),
        (
            "DTSTART:20260101T090000Z RRULE:FREQ=DAILY EXDATE;TZID=Europe/Vienna:20260329T110000,20260330T110000",
            "UTC",
            ["2026-03-31 09:00", "2026-04-01 09:00", "2026-04-02 09:00"],
        ),
        # The end.
        ("DTSTART:20260327T000000 RRULE:FREQ=DAILY;COUNT=3", "UTC", ["2026-03-29 00:00"]),
        ("FREQ=DAILY;UNTIL=20260330T000000Z", "UTC", ["2026-03-29 00:00", "2026-03-30 00:00"]),
        ("FREQ=DAILY;BYHOUR=9;UNTIL=20260330T090000", "Europe/Vienna", ["2026-03-29 07:00", "2026-03-30 07:00"]),
        ("FREQ=DAILY;UNTIL=99991231T235959Z", "UTC", ["2026-03-29 00:00", "2026-03-30 00:00", "2026-03-31 00:00"]),
    ],
)
def test_s09_a_rule_has_these_due_times_next(rule, tz, dues):
    assert following(rule, "2026-03-28 12:00", tz=tz) == dues


def test_s09_without_a_start_a_rule_counts_from_its_anchor():
    anchored = msgspec.structs.replace(timing(rrule="FREQ=DAILY;INTERVAL=3;COUNT=2"), anchor_at=ms("2026-03-28 12:34"))
    assert [said(at) for at in occurrences(anchored, 0)] == ["2026-03-28 12:34", "2026-03-31 12:34"]
    assert due_between(anchored, ms("2026-03-28 12:34"), 2**43, limit=9) == Run(2, ms("2026-03-31 12:34"), None)


@pytest.mark.parametrize(("week_start", "days"), [("MO", [5, 10, 19, 24]), ("SU", [5, 17, 19, 31])])
def test_s09_the_first_day_of_the_week_decides_which_weeks_are_in_turn(week_start, days):
    # The example of RFC 5545 itself.
    rule = f"DTSTART:19970805T090000Z RRULE:FREQ=WEEKLY;INTERVAL=2;COUNT=4;BYDAY=TU,SU;WKST={week_start}"
    assert following(rule, "1997-01-01 00:00", n=9) == [f"1997-08-{day:02} 09:00" for day in days]


@pytest.mark.parametrize("end", ["UNTIL=20260328T150000Z", "COUNT=3"])
def test_s09_a_rule_may_end_in_the_middle_of_a_day(end):
    rule = f"DTSTART:20260328T130000Z RRULE:FREQ=HOURLY;{end}"
    assert following(rule, "2026-03-28 00:00", n=9) == ["2026-03-28 13:00", "2026-03-28 14:00", "2026-03-28 15:00"]


def test_s09_the_zone_of_the_start_is_the_zone_of_the_schedule():
    made = timing(rrule="DTSTART;TZID=Asia/Tokyo:20260101T000000 FREQ=DAILY", tz="Europe/Vienna")
    assert (made.mode, made.tz) == (Mode.RRULE, "Asia/Tokyo")
    assert explain(made).endswith("FREQ=DAILY, Asia/Tokyo")


def test_s09_a_start_in_the_gap_is_the_first_instant_after_it():
    rule = "DTSTART;TZID=Europe/Vienna:20260329T023000 RRULE:FREQ=DAILY;COUNT=2"
    assert following(rule, "2026-01-01 00:00") == ["2026-03-29 01:00", "2026-03-30 00:30"]


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("", "empty"),
        (5, "int"),
        ("x" * 10_000, "10,000 characters"),
        ("FREQ", "'FREQ': write NAME=VALUE"),
        ("BYDAY=MO", "in FREQ"),
        ("FREQ=FORTNIGHTLY", "in FREQ: 'FORTNIGHTLY'"),
        ("FREQ=DAILY;FREQ=DAILY", "FREQ twice"),
        ("FREQ=DAILY;BYEASTER=1", "'BYEASTER'"),
        ("FREQ=DAILY;INTERVAL=0", "in INTERVAL: '0' is not 1-100,000"),
        ("FREQ=DAILY;INTERVAL=-1", "in INTERVAL"),
        ("FREQ=DAILY;INTERVAL=²", "in INTERVAL"),
        ("FREQ=DAILY;COUNT=10001", "in COUNT: '10001' is not 1-10,000"),
        ("FREQ=YEARLY;COUNT=1000", "in COUNT: 1000 times are not reached in 50 years"),
        ("FREQ=DAILY;COUNT=1;UNTIL=20260101T000000Z", "COUNT and UNTIL"),
        ("FREQ=DAILY;UNTIL=tomorrow", "in UNTIL: 'TOMORROW'"),
        ("FREQ=DAILY;UNTIL=20260231T000000Z", "in UNTIL: '20260231T000000Z' is not on the calendar"),
        ("FREQ=DAILY;WKST=XX", "in WKST: 'XX'"),
        ("FREQ=WEEKLY;BYDAY=XX", "in BYDAY: 'XX'"),
        ("FREQ=WEEKLY;BYDAY=2MO", "in BYDAY: '2MO' counts weekdays"),
        ("FREQ=MONTHLY;BYDAY=0MO", "in BYDAY: '0MO'"),
        ("FREQ=DAILY;BYHOUR=24", "in BYHOUR: '24' is not 0-23"),
        ("FREQ=DAILY;BYHOUR=-1", "in BYHOUR: '-1'"),
        ("FREQ=DAILY;BYMONTHDAY=0", "in BYMONTHDAY: '0' is not 1-31 or with a minus"),
        ("FREQ=DAILY;BYMONTH=1,13", "in BYMONTH: '13'"),
        ("FREQ=HOURLY;BYSETPOS=1", "in BYSETPOS"),
        ("DTSTART:20260101 DTSTART:20260102 FREQ=DAILY", "more than one DTSTART"),
        ("DTSTART:18990101 FREQ=DAILY", "in DTSTART: '18990101' is before 1900"),
        ("DTSTART;TZID=Europe/Viena:20260101 FREQ=DAILY", "did you mean 'Europe/Vienna'"),
        ("DTSTART;TZID=../etc/passwd:20260101 FREQ=DAILY", "no zone"),
        ("DTSTART;X=1:20260101 FREQ=DAILY", "in DTSTART: 'X=1'"),
        ("DTSTART:20260101T090000", "0 rules"),
        (" ".join(["FREQ=DAILY"] * 4), "4 rules: give 1 to 3"),
        ("EXRULE:FREQ=DAILY FREQ=DAILY", "'EXRULE'"),
        ("EXDATE:x FREQ=DAILY", "in EXDATE: 'x'"),
        # What would scan for ever.
        ("FREQ=YEARLY;BYMONTH=2;BYMONTHDAY=30", "never fires: no time fits BYMONTH and BYMONTHDAY"),
        ("FREQ=DAILY;BYMONTH=4;BYMONTHDAY=31", "never fires: no time fits BYMONTH and BYMONTHDAY"),
        ("FREQ=SECONDLY;BYMONTH=2;BYMONTHDAY=30", "never fires: no time fits BYMONTH and BYMONTHDAY"),
        ("FREQ=SECONDLY;INTERVAL=2;BYSECOND=1,3,5,7,9", "never fires: no time fits INTERVAL and BYSECOND"),
        ("FREQ=SECONDLY;INTERVAL=86400;BYHOUR=5;BYMINUTE=0;BYSECOND=1", "never fires"),
        ("FREQ=MINUTELY;INTERVAL=1440;BYHOUR=3", "never fires: no time fits INTERVAL and BYHOUR"),
        ("FREQ=HOURLY;INTERVAL=2;BYHOUR=1,3", "never fires: no time fits INTERVAL and BYHOUR"),
        ("FREQ=DAILY;BYSETPOS=2", "never fires: no time fits BYSETPOS"),
        ("FREQ=YEARLY;BYWEEKNO=53;BYMONTH=6", "never fires: no time fits BYWEEKNO and BYMONTH"),
        ("DTSTART:20260101T000000 FREQ=DAILY;UNTIL=20251231T000000", "never fires: no time fits DTSTART and UNTIL"),
    ],
)
def test_s09_a_wrong_rule_is_refused_with_the_part_and_the_reason(rule, words):
    begin = process_time()
    with pytest.raises(ConfigError, match=re.escape(words)) as refused:
        timing(rrule=rule)
    assert process_time() - begin < 1
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    "rule",
    [
        "FREQ=SECONDLY",
        "FREQ=SECONDLY;INTERVAL=7;BYHOUR=3;BYMINUTE=0",
        "FREQ=SECONDLY;BYMONTH=2;BYMONTHDAY=29;BYHOUR=0;BYMINUTE=0;BYSECOND=0",
        "FREQ=MINUTELY;INTERVAL=99999;BYMONTHDAY=29;BYMONTH=2",
        "DTSTART:19000101T000000 RRULE:FREQ=SECONDLY;INTERVAL=86399",
        "DTSTART:19000101T000000 RRULE:FREQ=DAILY;COUNT=10000",
        "DTSTART:99000101T000000 RRULE:FREQ=DAILY",
        "FREQ=YEARLY;BYSETPOS=" + ",".join(map(str, range(1, 200))) + ";BYDAY=" + ",".join(WEEKDAYS),
        "FREQ=DAILY;BYHOUR=" + ",".join(map(str, range(24))) + ";BYMINUTE=" + ",".join(map(str, range(60))),
        " ".join(["FREQ=DAILY;COUNT=9999"] * 3),
        "FREQ=YEARLY;INTERVAL=100000",
    ],
)
def test_s09_no_call_takes_long_for_any_rule(rule):
    spent = []
    begin = process_time()
    made = timing(rrule=rule, tz="Europe/Vienna")
    spent.append(process_time() - begin)
    for at in (ms("1900-01-01"), ms("2026-01-01"), ms("9000-01-01")):
        begin = process_time()
        first = next_after(made, at)
        spent.append(process_time() - begin)
        begin = process_time()
        if first is not None:
            due_between(made, first, first + 30 * 366 * 86_400_000, limit=1_000)
        spent.append(process_time() - begin)
    assert max(spent) < 1


def some(values, most=3):
    return st.lists(st.sampled_from(list(values)), min_size=1, max_size=most, unique=True).map(
        lambda chosen: ",".join(map(str, chosen))
    )


def signed(most):
    return [each for each in range(-most, most + 1) if each]


@st.composite
def rules(draw):
    freq = draw(st.sampled_from(["YEARLY", "MONTHLY", "WEEKLY", "DAILY", "HOURLY", "MINUTELY", "SECONDLY"]))
    parts = {
        "INTERVAL": st.integers(1, 40).map(str),
        "WKST": st.sampled_from(WEEKDAYS),
        "BYMONTH": some(range(1, 13)),
        "BYMONTHDAY": some(signed(31), 6),
        "BYYEARDAY": some(signed(366), 6),
        # dateutil forgets the days of week -52 or -53 that lie in the year before.
        "BYWEEKNO": some([*range(1, 54), *range(-50, 0)], 6),
        "BYDAY": some(WEEKDAYS, 5),
        "BYHOUR": some(range(24)),
        "BYMINUTE": some(range(60)),
        "BYSECOND": some(range(60)),
    }
    if freq in ("YEARLY", "MONTHLY"):
        parts["BYDAY"] |= some([f"{n}{day}" for n in (-5, -1, 1, 2, 5) for day in WEEKDAYS], 5)
    if freq in ("YEARLY", "MONTHLY", "DAILY"):
        # Not weekly: dateutil counts the days of the first week from the start on.
        parts["BYSETPOS"] = some(signed(6))
    chosen = draw(st.lists(st.sampled_from(list(parts)), max_size=4, unique=True))
    return ";".join([f"FREQ={freq}", *(f"{name}={draw(parts[name])}" for name in chosen)])


def taken_or_never(text):
    try:
        return timing(rrule=text)
    except ConfigError as refused:
        if "never fires" not in str(refused):
            raise


@pytest.mark.slow
@settings(deadline=None)
@given(rules(), st.datetimes(datetime(2020, 1, 1), datetime(2026, 1, 1)))
def test_s09_a_rule_is_due_when_dateutil_says(rule, start):
    start = start.replace(microsecond=0)
    text = f"DTSTART:{start:%Y%m%dT%H%M%S} RRULE:{rule}"
    made = taken_or_never(text)
    assume(made)
    found = list(islice(occurrences(made, 0), 12))
    # dateutil cannot be stopped while it looks for the next, so that it is asked only for what was found.
    end = datetime.fromtimestamp(found[-1] / 1_000, UTC).replace(tzinfo=None)
    assume(end - start < timedelta(days=2_000))
    expected = list(islice(rrulestr(text), len(found)))
    assert [datetime.fromtimestamp(at / 1_000, UTC).replace(tzinfo=None) for at in found] == expected


@pytest.mark.slow
@settings(deadline=None)
@given(rules(), st.sampled_from(["Europe/Vienna", "Australia/Lord_Howe", "America/Havana"]), st.integers(0, 2**41))
def test_s09_due_times_increase_and_are_those_of_asking_again_and_again(rule, tz, at):
    with suppress(ConfigError):
        made = timing(rrule=rule, tz=tz)
        walked = list(islice(occurrences(made, at), 6))
        assert walked == sorted(set(walked))
        assert [next_after(made, before) for before in [at, *walked[:-1]]][: len(walked)] == walked
        if walked:
            until = walked[-1]
            by_hand = [walked[0], *takewhile(lambda due: due <= until, islice(occurrences(made, walked[0]), 5))]
            run = due_between(made, walked[0], until, limit=6)
            assert (run.count, run.last) == (len(by_hand), by_hand[-1])


@given(st.text(max_size=60) | st.text("FREQ=DAILYBYHOURSETPOS;:,0123456789TZ ", max_size=60).map("FREQ=DAILY;".__add__))
def test_s09_any_text_is_taken_or_refused(text):
    with suppress(ConfigError):
        assert explain(timing(rrule=text))
