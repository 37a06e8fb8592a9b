"""Values as JSON text and back, arguments of handlers, errors as texts: J03, J04, J25, R04."""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import json
import os
import subprocess
import sys
import uuid
from typing import Annotated, Any

import msgspec
import pydantic
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from duly.errors import BadArguments, ConfigError, PayloadError, PayloadTooLarge
from duly.rules import codec, signature
from duly.rules import failure as failures

# Every character, lone surrogates and NUL and our own mark among them.
ANY_TEXT = st.text(st.characters(codec=None) | st.sampled_from('\x00\udc80\ud83d\ude00␛\\u0a"'), max_size=12)


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Point(msgspec.Struct):
    x: int
    label: str = ""


@dataclasses.dataclass
class Line:
    name: str
    price: decimal.Decimal
    tags: set[str] = dataclasses.field(default_factory=set)


@dataclasses.dataclass
class Order:
    id: uuid.UUID
    lines: list[Line]
    due: dt.date | None = None
    at: Point | None = None


class Person(pydantic.BaseModel):
    name: str
    born: dt.date | None = None
    home_town: str = pydantic.Field("", alias="homeTown")


class Strict(pydantic.BaseModel, strict=True):
    when: dt.datetime
    level: Level


class Unwilling(pydantic.BaseModel):
    def model_dump(self, **options: Any) -> Any:
        raise RuntimeError("no")


class Loose(pydantic.BaseModel):
    data: Any


class Free(pydantic.BaseModel, extra="allow"):
    pass


class Opaque:
    pass


ZONES = st.integers(-23 * 60, 23 * 60).map(lambda minutes: dt.timezone(dt.timedelta(minutes=minutes)))
LINES = st.builds(Line, ANY_TEXT, st.decimals(allow_nan=False), st.sets(ANY_TEXT, max_size=3))
TYPED = st.one_of(
    *(
        values.map(lambda value, hint=hint: (value, hint))
        for hint, values in [
            (dt.datetime, st.datetimes(timezones=st.none() | ZONES)),
            (dt.date, st.dates()),
            (dt.time, st.times()),
            (dt.timedelta, st.timedeltas()),
            (decimal.Decimal, st.decimals(allow_nan=False)),
            (uuid.UUID, st.uuids()),
            (bytes, st.binary(max_size=20)),
            (str, ANY_TEXT),
            (float, st.floats(allow_nan=False, allow_infinity=False)),
            (int, st.integers(-(2**100), 2**100)),
            (Colour, st.just(Colour.RED)),
            (Level, st.just(Level.HIGH)),
            (set[str], st.sets(ANY_TEXT, max_size=4)),
            (tuple[int, str], st.tuples(st.integers(), ANY_TEXT)),
            (dict[int, str], st.dictionaries(st.integers(), ANY_TEXT, max_size=3)),
            (dict[dt.date, list[bytes]], st.dictionaries(st.dates(), st.lists(st.binary()), max_size=3)),
            (Order, st.builds(Order, st.uuids(), st.lists(LINES, max_size=3), st.none() | st.dates())),
            (list[Point | None], st.lists(st.none() | st.builds(Point, st.integers(), ANY_TEXT), max_size=3)),
            (
                Person,
                st.builds(lambda n, b: Person(name=n, born=b, homeTown=n), st.text(), st.none() | st.dates()),
            ),
        ]
    )
)


@pytest.mark.slow
@settings(max_examples=300)
@given(TYPED)
def test_encoded_values_decode_to_equal_ones(pair):
    value, hint = pair
    text = codec.encode(value)
    assert codec.decode(text, hint) == value
    assert codec.decode(codec.encode([value, None]), list[hint | None]) == [value, None]


@settings(max_examples=200)
@given(
    st.recursive(
        ANY_TEXT | st.none() | st.integers(),
        lambda i: st.lists(i, max_size=3) | st.dictionaries(ANY_TEXT, i, max_size=3),
    )
)
def test_j25_a_payload_is_plain_json_that_every_database_accepts(value):
    text = codec.encode(value)
    text.encode()
    assert "\x00" not in text
    assert "\\u0000" not in text.replace("\\\\", "")
    assert "\\ud" not in text.replace("\\\\", "")
    json.loads(text)
    assert codec.decode(text, Any) == value


def test_a_text_without_odd_characters_is_stored_as_it_is():
    assert codec.encode({"a": "é\\u0000"}) == '{"a":"é\\\\u0000"}'
    assert codec.encode("a\x00") == '"a␛0000"'
    assert codec.encode("␛") == '"␛241b"'


def test_text_that_others_wrote_is_read_too():
    assert codec.decode('"a\\u0000"', str) == "a\x00"
    assert codec.decode('"␛ and ␛zz"', str) == "␛ and ␛zz"


def test_models_are_stored_by_alias_so_that_they_read_back():
    assert codec.encode(Person(name="A", homeTown="B")) == '{"name":"A","born":null,"homeTown":"B"}'
    strict = Strict(when=dt.datetime(2026, 1, 2, tzinfo=dt.UTC), level=Level.HIGH)
    assert codec.decode(codec.encode([strict]), list[Strict]) == [strict]


def test_subclasses_of_plain_types_are_stored_as_plain():
    made = [type(kind.__name__, (kind,), {})(value) for kind, value in ((str, "a"), (int, 1), (float, 1.5))]
    assert codec.encode(made) == '["a",1,1.5]'


LOOP: list[Any] = [1]
LOOP.append({"back": LOOP})
TWICE = {1: "a", "1": "b"}
TWO_KEYS = "has two keys that become '1' in JSON: give them different texts"


def nested(depth: int) -> list[Any]:
    value: list[Any] = [None]
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (float("nan"), "the value is nan"),
        ({"a": [1, {"b": float("inf")}]}, "a[1].b is inf"),
        (Line("x", float("-inf")), "price is -inf"),
        ({"p": Person.model_construct(name=float("nan"))}, "p.name is nan"),
        (Unwilling(), "the value cannot be stored: no"),
        (Opaque(), "the value is of type Opaque"),
        ({"orders": [Order(Opaque(), [])]}, "orders[0].id is of type Opaque"),
        ([Point(Opaque())], "[0].x is of type Opaque"),
        ({"a b": {3: Opaque()}}, "['a b'][3] is of type Opaque"),
        ({"a": {(1, 2): 3}}, "a has a key of type tuple"),
        ({None: 3}, "the value has a key of type NoneType"),
        ({"a": (n for n in [1])}, "a is of type generator"),
        ({"x": LOOP}, "x[1].back refers to itself"),
        ({"n": [10**5000]}, "n[0] has more than 4,300 digits: give it as a text"),
        (nested(20_000), "the value is nested too deeply"),
        (TWICE, f"the value {TWO_KEYS}"),
        ({"a b": [Point(TWICE)]}, f"['a b'][0].x {TWO_KEYS}"),
        (Line(TWICE, 1), f"name {TWO_KEYS}"),
        ([Loose(data={"x": TWICE})], f"[0].data.x {TWO_KEYS}"),
        (Free(more=TWICE), f"more {TWO_KEYS}"),
        ({"a": "\udc80", "b": (TWICE,)}, f"b[0] {TWO_KEYS}"),
        ({1: "\x00", "1": None}, f"the value {TWO_KEYS}"),
        ({"red": "␛", Colour.RED: 2}, "the value has two keys that become 'red' in JSON"),
        ({uuid.UUID(int=1): 1, str(uuid.UUID(int=1)): 2}, "the value has two keys that become '0000"),
        ([-(10**4299)], "the value cannot be stored: Integer value out of range"),
        ({"a": "\udc80", "b": Opaque()}, "b is of type Opaque"),
        ({"a": "\x00", "b": float("nan")}, "b is nan"),
    ],
)
def test_j25_a_value_that_cannot_be_stored_is_refused_with_its_path(value, said):
    with pytest.raises(PayloadError) as refused:
        codec.encode(value)
    assert str(refused.value).startswith(said)


class Flags(pydantic.BaseModel):
    by_flag: dict[bool, int]
    notes: dict[Any, Any] = pydantic.Field(exclude=True)


@pytest.mark.parametrize("value", [{True: None}, [{False: 1, "x": None}]])
def test_j25_keys_that_stay_different_are_taken(value):
    codec.encode(value)


def test_j25_only_keys_that_are_stored_are_compared():
    made = Flags(by_flag={True: 1, False: 2}, notes={1: 1, "1": 2})
    assert msgspec.json.decode(codec.encode(made)) == {"by_flag": {"true": 1, "false": 2}}


@pytest.mark.parametrize("depth", [*range(0, 1_200, 25), 499])
def test_j25_data_of_any_depth_is_read_back_or_refused(depth):
    if depth < 500:
        text = codec.encode(nested(depth))
        assert codec.decode(text, Any) == codec.plain(text) == nested(depth)
        return
    with pytest.raises(PayloadError) as refused:
        codec.encode(nested(depth))
    how = f"{depth + 1} levels deep" if depth < 900 else ""
    assert str(refused.value).startswith(f"the value is nested {how}")
    assert str(refused.value).endswith("the limit is 500: give flatter data, or a reference to it")


def test_j25_only_the_brackets_outside_texts_are_levels():
    deep = {"\\": [nested(497), '"' + "[" * 900, "]}\\"], "{": ["\x00["] * 600}
    assert codec.plain(codec.encode(deep)) == deep
    assert codec.plain(codec.encode("[" * 501)) == "[" * 501
    with pytest.raises(PayloadError, match="nested 502 levels deep"):
        codec.encode(["]" * 900, nested(499), [deep]])


@pytest.mark.parametrize(
    ("text", "hint", "said"),
    [
        ('"1"', int, "cannot read this as int: `$`: expected `int`, got `str`"),
        ('[{"x":1},{"x":"a"}]', list[Point], "`$[1].x`: expected `int`"),
        ('["␛0000",{"x":"a"}]', list[Point | str], "`$[1].x`: expected `int`"),
        ('[{"name":5}]', list[Person], "`$[0]`: expected `Person`, got name: "),
        ("1", Opaque, "Opaque"),
        ("{", dict, "truncated"),
        ("[" * 20_000 + "]" * 20_000, Any, "deep"),
    ],
)
def test_a_value_of_another_type_is_refused_with_path_and_type(text, hint, said):
    with pytest.raises(BadArguments) as refused:
        codec.decode(text, hint)
    assert said in str(refused.value)


def every_kind(a: int, /, b: dt.date, *rest: Line, c: str = "c", d: Any = None, **more: decimal.Decimal) -> Order:
    raise NotImplementedError


def send(order_id: int, email: str, when: dt.date | None = None) -> str:
    raise NotImplementedError


def plain(a, b=2):
    raise NotImplementedError


def with_ctx(ctx: Unknown, n: int) -> Nowhere:  # noqa: F821
    raise NotImplementedError


SEND = signature.signature_codec(send)
EVERY = signature.signature_codec(every_kind)


def plainly(number: int, text: str, truth: bool, share: float) -> None: ...


PLAIN = (st.integers(-(2**70), 2**70), ANY_TEXT, st.booleans(), st.floats())


@given(st.tuples(*PLAIN) | st.tuples(*[st.one_of(*PLAIN, st.none())] * 4))
@example((1, "a\x00", True, 0.5))
@example(("\ud800", "a", True, 0.5))
@example((1, "␛0000", True, 0.5))
@example((1, "\udc80", True, 0.5))
@example((1, "null", True, 0.5))
@example((1, "", True, float("nan")))
@example((2**64, "", True, 0.5))
@example((True, "", 1, 1))
@example((-(10**4299), "", True, 0.5))  # of which no worker can read as many digits
def test_j03_a_call_of_plain_numbers_and_texts_is_written_as_every_other(args):
    codec_of = signature.signature_codec(plainly)
    # By name they take the long way, on which what is written is read back.
    by_name = dict(zip(("number", "text", "truth", "share"), args, strict=True))
    assert written(codec_of, args, {}) == written(codec_of, (), by_name)


def written(codec_of: signature.SignatureCodec, args: Any, kwargs: Any) -> str:
    try:
        return codec_of.encode_call(args, kwargs)
    except BadArguments as error:
        return str(error)


def test_j03_a_call_is_stored_by_name_however_it_was_written():
    text = '{"order_id":42,"email":"a@b.c"}'
    assert SEND.encode_call((42, "a@b.c"), {}) == text
    assert SEND.encode_call((42,), {"email": "a@b.c"}) == text
    assert json.loads(SEND.encode_call((), {"email": "a@b.c", "order_id": 42})) == json.loads(text)
    assert SEND.decode_call(text) == ([], {"order_id": 42, "email": "a@b.c"})


def test_j03_dates_given_as_text_are_taken_as_json_has_them():
    text = SEND.encode_call((1, "a", "2026-01-02"), {})
    assert SEND.decode_call(text)[1]["when"] == dt.date(2026, 1, 2)


@settings(max_examples=100)
@given(
    st.integers(),
    st.dates(),
    st.lists(LINES, max_size=2),
    st.dictionaries(st.sampled_from("cxyz"), st.decimals(allow_nan=False), max_size=3),
    ANY_TEXT,
)
def test_j03_every_kind_of_parameter_round_trips(a, b, rest, more, c):
    kwargs = {**more, "c": c}
    args, named = EVERY.decode_call(EVERY.encode_call((a, b, *rest), kwargs))
    bound = EVERY.signature.bind(*args, **named)
    assert bound == EVERY.signature.bind(a, b, *rest, **kwargs)
    assert EVERY.arguments((a, b, *rest), kwargs) == {
        "a": a,
        "b": b,
        "rest": tuple(rest),
        "d": None,
        **kwargs,
    }


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        ((42,), {}, "missing a required argument: 'email'"),
        ((), {}, "missing a required argument: 'order_id'"),
        ((1, "a", None, 4), {}, "too many positional arguments"),
        ((1, "a"), {"order_id": 1}, "multiple values for argument 'order_id'"),
        ((1, "a"), {"whne": None}, "instead of `whne` did you mean `when`?"),
        (("42", "a"), {}, "argument `order_id`: expected `int`, got `str` (`order_id` is int)"),
        ((1, None), {}, "argument `email`: expected `str`, got `null`"),
        ((True, "a"), {}, "argument `order_id`: expected `int`, got `bool`"),
        ((1, "a", "soon"), {}, "argument `when`: invalid"),
        ((1, b"a"), {}, "argument `email`: expected `str`, got `bytes`"),
        ((1, dt.date(2026, 1, 2)), {}, "argument `email`: expected `str`, got `date`"),
        ((1, uuid.UUID(int=1)), {}, "argument `email`: expected `str`, got `uuid`"),
        ((1, decimal.Decimal(1)), {}, "argument `email`: expected `str`, got `decimal`"),
        ((1, Opaque()), {}, "email is of type Opaque"),
        ((float("nan"), "a"), {}, "order_id is nan"),
        ((1, "a", dt.datetime(2026, 1, 2)), {}, "argument `when`"),
    ],
)
def test_j03_wrong_arguments_are_refused_with_the_path_and_the_type(args, kwargs, said):
    with pytest.raises(BadArguments) as refused:
        SEND.encode_call(args, kwargs)
    assert said in str(refused.value)
    assert str(refused.value).startswith("send")


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        ((1, "2026-01-02", {"name": "x", "price": "1"}, {"name": "x", "price": "y"}), {}, "`rest[1].price`"),
        ((1, "2026-01-02"), {"x": "y"}, "`x`"),
        ((1, "2026-01-02", Line(5, 1)), {}, "`rest[0].name`: expected `str`, got `int`"),
        ((1, "2026-01-02"), {"a": 1}, "`a` in `**more` names another parameter"),
        ((1, "2026-01-02"), {"rest": 1}, "`rest` in `**more` names another parameter"),
    ],
)
def test_j03_the_path_leads_into_starred_arguments(args, kwargs, said):
    with pytest.raises(BadArguments) as refused:
        EVERY.encode_call(args, kwargs)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "not a JSON object"),
        ('{"order_id":1', "not a JSON object"),
        ('{"order_id":1}', "argument `email` (str) is missing"),
        ('{"order_id":1,"email":"a","whn":1}', "no argument `whn`; instead of `whn` did you mean `when`?"),
        ('{"order_id":"1","email":"a"}', "`order_id`: expected `int`, got `str`"),
    ],
)
def test_u01_a_payload_that_no_longer_fits_is_refused_on_reading(text, said):
    with pytest.raises(BadArguments) as refused:
        SEND.decode_call(text)
    assert said in str(refused.value)


def test_a_default_is_left_to_the_handler_that_runs():
    assert signature.signature_codec(plain).encode_call((1,), {}) == '{"a":1}'
    assert signature.signature_codec(plain).arguments((1,), {}) == {"a": 1, "b": 2}
    assert EVERY.decode_call('{"a":1,"b":"2026-01-02"}') == ([1], {"b": dt.date(2026, 1, 2)})


def test_without_annotations_plain_json_round_trips():
    text = signature.signature_codec(plain).encode_call((Line("x", decimal.Decimal("1.5")), {1}), {})
    assert signature.signature_codec(plain).decode_call(text)[1] == {
        "a": {"name": "x", "price": "1.5", "tags": []},
        "b": [1],
    }


def test_models_and_dataclasses_come_back_as_such_and_nested_mistakes_are_found():
    def handler(who: Person, order: Order | None = None) -> None: ...

    made = signature.signature_codec(handler)
    person, order = Person(name="A\x00"), Order(uuid.UUID(int=1), [Line("␛", decimal.Decimal(1), {"t"})])
    assert made.decode_call(made.encode_call((person, order), {})) == ([], {"who": person, "order": order})
    assert made.decode_call(made.encode_call(({"name": "A"},), {}))[1] == {"who": Person(name="A")}
    with pytest.raises(BadArguments, match=r"`who`: expected `Person`, got name: "):
        made.encode_call(({"name": 5},), {})


def test_j03_a_value_is_never_quoted_in_a_refusal():
    with pytest.raises(BadArguments) as refused:
        SEND.encode_call(("geheim", "geheim"), {})
    assert "geheim" not in str(refused.value)


@pytest.mark.parametrize("name", ["__post_init__", "__x", "self", "type", "_"])
def test_a_parameter_may_have_any_name(name):
    defined: dict[str, Any] = {}
    exec(f"def handler({name}: int) -> None: ...", defined)
    codec_of = signature.signature_codec(defined["handler"])
    assert codec_of.encode_call((5,), {}) == f'{{"{name}":5}}'
    assert codec_of.decode_call(f'{{"{name}":5}}') == ([], {name: 5})


def test_the_context_parameter_is_left_out_and_never_resolved():
    made = signature.signature_codec(with_ctx, skip_first=True)
    assert made.decode_call(made.encode_call((5,), {})) == ([], {"n": 5})
    with pytest.raises(ConfigError, match="ctx"):
        signature.signature_codec(with_ctx)


def test_a_nested_handler_may_name_itself_and_enclosing_names():
    class Local(msgspec.Struct):
        n: int

    def decorated(handler: Any) -> Any:
        return signature.signature_codec(handler)

    @decorated
    def again(value: Local) -> Any:
        return again, Local

    assert again.decode_call('{"value":{"n":1}}') == ([], {"value": Local(1)})


def test_annotations_with_limits_are_kept():
    def handler(n: Annotated[int, msgspec.Meta(ge=1)]) -> None: ...

    with pytest.raises(BadArguments, match=">= 1"):
        signature.signature_codec(handler).encode_call((0,), {})


def test_an_annotation_that_json_cannot_serve_is_refused_at_definition():
    def handler(a: int, b: dt.date | uuid.UUID) -> None: ...

    with pytest.raises(ConfigError, match=r"handler: parameter `b`"):
        signature.signature_codec(handler)


def test_the_result_is_read_by_the_handlers_annotation():
    assert signature.result_type(every_kind) is Order
    assert signature.result_type(plain) is Any
    assert signature.result_type(with_ctx) is Any


def test_k05_a_set_with_odd_characters_is_sorted_too():
    names = {f"{n}\x00" for n in range(9)}
    assert json.loads(codec.encode(names, sets=True)) == [f"{n}␛0000" for n in range(9)]


def test_k05_a_set_is_stored_in_the_same_order_by_every_process():
    code = (
        "from duly.rules.signature import signature_codec\n"
        "def handler(names: frozenset[str]): ...\n"
        "print(signature_codec(handler).encode_call(({'a', 'b', 'c', 'd', 'e', 'f'},), {}))"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert texts == {'{"names":["a","b","c","d","e","f"]}\n'}


def test_j04_a_payload_over_96_000_bytes_is_refused_with_size_limit_task_and_remedy():
    codec.check_size("x" * 96_000, "send")
    codec.check_size("é" * 48_000, "send")
    with pytest.raises(PayloadTooLarge, match=r"send: .*96,002 bytes.*96,000.*pass a reference"):
        codec.check_size("é" * 48_001, "send")


@given(ANY_TEXT, st.text(max_size=300), st.integers(-5, 200))
def test_r04_a_clipped_text_is_within_its_limit_and_valid(odd, text, limit):
    for each in (text, text + odd, odd * 20):
        clipped = failures.clip(each, limit)
        assert len(clipped.encode()) <= max(limit, 0)
        if len(each.encode("utf-8", "backslashreplace")) <= limit:
            assert clipped == each.encode("utf-8", "backslashreplace").decode()


def test_r04_head_and_tail_are_kept_and_the_cut_is_counted():
    text = "head " + "é" * 10_000 + " tail"
    clipped = failures.clip(text, 1_000)
    head, said, tail = clipped.partition("… ")
    count, _, tail = tail.partition(" bytes cut …")
    assert said
    assert text.startswith(head)
    assert text.endswith(tail)
    assert len(head.encode()) + len(tail.encode()) + int(count) == len(text.encode())
    assert 990 <= len(clipped.encode()) <= 1_000
    assert abs(len(head) - len(tail)) <= 5


@given(ANY_TEXT)
def test_r04_escaped_text_can_be_stored_and_is_otherwise_the_same(text):
    escaped = failures.escape_text(text)
    escaped.encode()
    assert "\x00" not in escaped
    if escaped == text:
        text.encode()
    assert failures.escape_text(escaped) == escaped


def test_r04_nul_and_lone_surrogates_are_made_visible():
    assert failures.escape_text("a\x00b\udc80é") == "a\\u0000b\\udc80é"


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_r04_an_error_is_described_by_class_message_and_traceback():
    failure = failures.describe(raised(ValueError("bad\x00")))
    assert (failure.kind, failure.message) == ("ValueError", "bad\\u0000")
    assert "in raised" in failure.traceback
    assert failure.traceback.rstrip().endswith("ValueError: bad\\u0000")
    assert failures.describe(ConfigError("x")).kind == "duly.errors.ConfigError"
    assert failures.describe(Mute()).kind == f"{__name__}.Mute"


class Untraceable(Exception):
    @property
    def __traceback__(self) -> None:
        raise RuntimeError("no")


def test_r04_an_error_without_a_traceback_is_described():
    failure = failures.describe(Untraceable("bad"), called_by=__file__)
    assert (failure.kind, failure.message) == (f"{__name__}.Untraceable", "bad")
    assert failure.traceback == ""


def test_r04_a_huge_error_keeps_head_and_tail_within_8_and_32_kilobytes():
    failure = failures.describe(raised(ValueError("<" + "\x00é" * 1_000_000 + ">")))
    assert len(failure.message.encode()) <= 8_192
    assert len(failure.traceback.encode()) <= 32_768
    assert failure.message.startswith("<")
    assert failure.message.endswith(">")
    assert "bytes cut" in failure.message
    assert failure.traceback.startswith("Traceback")


def endless(n: int) -> int:
    return endless(n + 1) + 1


def deep_recursion() -> BaseException:
    try:
        endless(0)
    except RecursionError as error:
        return error
    raise AssertionError


def circle() -> BaseException:
    one, two = ValueError("one"), KeyError("two")
    one.__cause__, two.__cause__ = two, one
    return raised(one)


def chain() -> BaseException:
    error = ValueError("first")
    for n in range(2_000):
        later = ValueError(n)
        later.__cause__ = error
        error = later
    return error


def groups() -> BaseException:
    error: Exception = ValueError("inner")
    for _ in range(3_000):
        error = ExceptionGroup("outer", [error])
    return error


def noted() -> BaseException:
    error = ValueError("noted")
    error.__notes__ = 5  # type: ignore[assignment]
    return error


@pytest.mark.parametrize("make", [Mute, deep_recursion, circle, chain, groups, noted, KeyboardInterrupt])
def test_r04_an_error_whose_methods_raise_is_described(make):
    failure = failures.describe(make())
    assert failure.kind
    assert len(failure.message.encode()) <= 8_192
    assert failure.traceback is not None
    assert len(failure.traceback.encode()) <= 32_768


def test_r04_an_error_without_a_message_has_the_reason():
    assert failures.describe(Mute()).message == "<no text: asking for it raised RuntimeError>"
