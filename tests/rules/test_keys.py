"""Ids, fingerprints and keys: K05, R06."""

from __future__ import annotations

import enum
import gc
import json
import os
import random
import signal
import threading
import uuid
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duly.errors import ConfigError
from duly.rules.keys import Ids, fingerprint, key_of, new_id, new_token, replay_key

TIMES = st.integers(0, 2**48 - 1)
TAILS = st.binary(min_size=10, max_size=10)


class Clock:
    """A clock that is set by hand, in milliseconds."""

    def __init__(self, ms: int = 1_700_000_000_000) -> None:
        self.ms = ms

    def __call__(self) -> int:
        return self.ms * 1_000_000


@given(TIMES, TAILS)
def test_an_id_is_a_uuid_of_version_7_that_holds_its_time(now_ms, tail):
    read = uuid.UUID(new_id(now_ms, tail))
    assert str(read) == new_id(now_ms, tail)
    assert (read.version, read.variant) == (7, uuid.RFC_4122)
    assert read.int >> 80 == now_ms


@given(TIMES, TIMES, TAILS, TAILS)
def test_ids_sort_by_time(one, other, tail, other_tail):
    if one < other:
        assert new_id(one, tail) < new_id(other, other_tail)


@given(TAILS, TAILS)
def test_all_74_random_bits_are_used(one, other):
    kept = [int.from_bytes(tail, "big") & (2**74 - 1) for tail in (one, other)]
    assert (new_id(0, one) == new_id(0, other)) == (kept[0] == kept[1])


@given(st.lists(st.integers(-5_000, 5_000), min_size=1, max_size=60))
def test_ids_increase_for_any_clock(steps):
    clock = Clock()
    ids, made = Ids(clock, random.Random(1).randbytes), []
    for step in steps:
        clock.ms += step
        made += [ids(), ids()]
    assert made == sorted(set(made))


def test_ids_rise_when_the_tail_overflows():
    ids = Ids(Clock(), lambda n: b"\xff" * n)
    ids()
    ids._tail = 2**74 - 2
    made = [ids() for _ in range(4)]
    assert made == sorted(set(made))


@given(st.lists(st.integers(0, 5), max_size=8), st.booleans())
def test_ids_that_are_made_together_rise_like_others(counts, full):
    """Also where the tail has no room for all of them, and the clock stands still."""
    ids = Ids(Clock(), lambda n: b"\xff" * n)
    if full:
        ids()
        ids._tail = 2**74 - 4
    made = [id_ for count in counts for id_ in (*ids.many(count), ids())]
    assert len(made) == sum(counts) + len(counts)
    assert made == sorted(set(made))
    assert all(uuid.UUID(id_).version == 7 for id_ in made)


def test_ids_take_their_time_from_the_clock():
    clock = Clock()
    ids = Ids(clock, os.urandom)
    assert uuid.UUID(ids()).int >> 80 == clock.ms
    clock.ms += 10
    assert uuid.UUID(ids()).int >> 80 == clock.ms


def test_ids_of_many_threads_differ_and_rise_in_each():
    ids, made = Ids(), [[] for _ in range(4)]
    threads = [threading.Thread(target=lambda mine=mine: mine.extend(ids() for _ in range(2_000))) for mine in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set().union(*made)) == 8_000
    assert all(mine == sorted(mine) for mine in made)


def id_of_a_forked_child(ids: Ids) -> uuid.UUID:
    read, write = os.pipe()
    with ids._lock:  # as if another thread were making an id at this moment
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a child that hangs must not outlive the test
            signal.alarm(5)
            os.write(write, ids().encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return uuid.UUID(text)


@pytest.mark.parametrize("first", [0, 5, 2**48 - 3, 2**48 - 2, 2**48 - 1, 2**62 - 2, 2**73 - 9])
def test_ids_made_together_are_those_made_one_by_one(first: int) -> None:
    together, alone = (Ids(Clock(), lambda n: first.to_bytes(10, "big") * (n // 10)) for _ in range(2))
    assert together.many(7) == [alone() for _ in range(7)]
    assert together() == alone()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_children_make_ids_of_their_own_even_when_the_lock_was_held():
    ids = Ids(Clock())
    ids()
    made = sorted(each.int for each in (id_of_a_forked_child(ids), id_of_a_forked_child(ids), uuid.UUID(ids())))
    assert min(made[1] - made[0], made[2] - made[1]) > 1_000


def test_ids_are_garbage_collected_despite_the_fork_hook():
    ids = Ids()
    seen = weakref.ref(ids)
    del ids
    gc.collect()
    assert seen() is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=10,
)


def reversed_keys(value):
    match value:
        case dict():
            return {key: reversed_keys(value[key]) for key in reversed(value)}
        case list():
            return [reversed_keys(item) for item in value]
    return value


@given(JSON)
def test_a_fingerprint_does_not_depend_on_the_order_of_keys_or_on_spacing(value):
    one = fingerprint(json.dumps(value))
    assert one == fingerprint(json.dumps(reversed_keys(value), indent=1, ensure_ascii=False))
    assert len(one) == 32
    assert int(one, 16) >= 0


@given(JSON, JSON)
def test_a_fingerprint_distinguishes_payloads(one, other):
    same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert (fingerprint(json.dumps(one)) == fingerprint(json.dumps(other))) == same


def test_a_fingerprint_is_the_same_in_every_version():
    assert fingerprint('{"b": [1, null], "a": "é"}') == fingerprint('{"a":"\\u00e9","b":[1,null]}')
    assert fingerprint("{}") == "2afb9b83f9314e5d029766197f539792"


class Word(str, enum.Enum):  # noqa: UP042, its str() is not its value
    ONE = "one"


class Number(enum.IntEnum):
    TWO = 2


@pytest.mark.parametrize(
    ("key", "text"), [("receipt:42", "receipt:42"), (42, "42"), (Word.ONE, "one"), (Number.TWO, "2")]
)
def test_k05_a_key_is_a_text_or_a_number(key, text):
    assert key_of(key, {}) == text
    assert type(key_of(key, {})) is str


@pytest.mark.parametrize(
    "key",
    [
        lambda order_id: f"r:{order_id}",
        lambda email, order_id: f"r:{order_id}",
        lambda order_id, **rest: f"r:{order_id}",
        lambda **every: f"r:{every['order_id']}",
        lambda order_id, other=5: f"r:{order_id}",
        lambda o, e: f"r:{o}",
        lambda o, e, /: f"r:{o}",
        lambda order_id, email, /: f"r:{order_id}",
    ],
)
def test_k05_a_key_can_be_a_function_of_the_arguments(key):
    assert key_of(key, {"order_id": 42, "email": "a@b.c"}) == "r:42"


def test_k05_a_key_function_that_names_no_argument_is_refused():
    with pytest.raises(ConfigError, match=r"\(user\).*\(order_id, email\)"):
        key_of(lambda user: user, {"order_id": 42, "email": "a@b.c"})


def test_k05_a_key_functions_own_error_is_not_hidden():
    with pytest.raises(ZeroDivisionError):
        key_of(lambda n: 1 // n, {"n": 0})


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ("", "empty"),
        (None, "NoneType"),
        (True, "bool"),
        (1.5, "float"),
        (uuid.UUID(int=1), "UUID"),
        ("x" * 513, "513"),
        ("a\x00b", "NUL"),
        ("a\udc80", "surrogate"),
    ],
)
def test_k05_an_invalid_key_is_refused_with_the_reason(made, said):
    with pytest.raises(ConfigError, match=said):
        key_of(made, {})
    with pytest.raises(ConfigError, match=said):
        key_of(lambda: made, {})


def test_k05_a_key_of_512_characters_is_taken():
    assert key_of("é" * 512, {}) == "é" * 512


@given(st.text(max_size=20), st.integers(1, 999), st.integers(1, 999))
def test_r06_a_replay_mark_replaces_the_one_before(key, first, second):
    assert replay_key(replay_key(key, first), second) == replay_key(key, second)
    assert replay_key(key, first).endswith(f"#replay{first}")


def test_r06_only_a_mark_at_the_end_is_replaced():
    assert replay_key("a#replay1:b", 2) == "a#replay1:b#replay2"
    assert replay_key("a#replay", 2) == "a#replay#replay2"
    assert replay_key("a#replay1", 2) == "a#replay2"
    assert replay_key("a#replay1\n", 2) == "a#replay1\n#replay2"


def test_j08_a_token_is_exact_as_a_double_and_never_repeats() -> None:
    tokens = {new_token() for _ in range(10_000)}
    assert len(tokens) == 10_000
    assert all(1 <= token == int(float(token)) for token in tokens)
