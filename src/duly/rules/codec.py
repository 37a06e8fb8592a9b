"""Python values as JSON text and back, typed by the reader's annotations.

Databases refuse two kinds of characters: NUL, which PostgreSQL cannot parse even as an escape in JSON, and lone
surrogates, which are not UTF-8. Payloads and results store them as `␛0000` and `␛dc80`, and `␛` itself as `␛241b`.
`decode` and `plain` restore them for every reader. In errors and messages, which only people read,
`failure.escape_text` replaces them.
"""

from __future__ import annotations

import json
import math
import re
import typing
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, TypeVar, overload

import msgspec

from duly.errors import BadArguments, PayloadError, PayloadTooLarge

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

T = TypeVar("T")

MAX_PAYLOAD = 96_000
MAX_DEPTH = 500  # a reader takes a frame for each level, of Python's thousand

LONG = 4000
LARGEST = 1024 * 1024  # of a result; the limit of payloads is lower
MARK = "␛"
_TO_MARK = re.compile(f"[\x00\ud800-\udfff{MARK}]")
_MARKED = re.compile(f"{MARK}([0-9a-f]{{4}})")


def encode(value: Any, *, sets: bool = False) -> str:
    """Write `value` as JSON text that every store can keep.

    With `sets`, sets are sorted: their order differs between processes, and the payload of a keyed job must not.
    """
    encoder = _SORTED if sets else _ENCODER
    try:
        text = _text(value, encoder)
        # The encoder writes NaN and infinity as null, so only a text with a null has to be searched.
        found = _too_deep(text) or (_not_finite(value) if "null" in text else None)
        if found is None and ("{" in text or len(text) > LONG) and len(text) <= LARGEST and not _rewritten(text):
            found = _twice(value)
    except Exception as error:
        raise PayloadError(_refusal(value, error)) from error
    if found:
        raise PayloadError(found)
    return text


def encode_simple(kind: type, values: Sequence[Any]) -> str | None:
    """Write plain numbers and texts as the fields of a struct; returns None if a value needs `encode`."""
    try:
        text = _ENCODER.encode(kind(*values)).decode()
    except Exception:
        return None
    # A long one may hold a number that has more digits than can be read.
    return None if len(text) > LONG or "null" in text or "\\u0000" in text or MARK in text else text


def _text(value: Any, encoder: msgspec.json.Encoder) -> str:
    """Encode; only values with characters to replace take the slow path."""
    try:
        text = encoder.encode(value).decode()
        if "\\u0000" not in text and MARK not in text:
            return text
    except UnicodeEncodeError:
        pass  # a lone surrogate
    if twice := _twice(value):  # in plain data one entry would replace the other
        raise PayloadError(twice)
    order: Any = "deterministic" if encoder is _SORTED else None
    data = msgspec.to_builtins(value, str_keys=True, enc_hook=_to_plain, order=order)
    return encoder.encode(each_text(data, _mark)).decode()


def _to_plain(value: Any) -> Any:
    """Convert a value that msgspec does not know; raise if it cannot be stored."""
    if hasattr(type(value), "model_dump"):  # pydantic, which we do not import
        if _may_hold_dicts(value.__class__):
            _refuse_equal_keys(value)
        return value.model_dump(mode="json", **_DUMPED)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    raise NotImplementedError


def _refuse_equal_keys(model: Any) -> None:
    """Raise if two keys of a dict become one text: a model is dumped with one of both entries, its JSON has both."""

    def entries(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise PayloadError(
                _twice(model) or "the value has two keys that become one text: give them different texts"
            )
        return found

    try:
        text = model.model_dump_json(**_DUMPED)
    except ValueError:  # a lone surrogate, which only plain data can have
        if twice := _twice(model):
            raise PayloadError(twice) from None
    else:
        json.loads(text, object_pairs_hook=entries)


_DUMPED: Any = {"by_alias": True, "round_trip": True, "warnings": False}


@lru_cache(maxsize=1024)
def _may_hold_dicts(model: type) -> bool:
    """Return whether a model has a field for a dict or for anything; most have none, and need no search."""
    return re.search("'(dict|any|allow)'", repr(getattr(model, "__pydantic_core_schema__", "'any'"))) is not None


_ENCODER = msgspec.json.Encoder(enc_hook=_to_plain)
_SORTED = msgspec.json.Encoder(enc_hook=_to_plain, order="deterministic")


def each_text(plain: Any, change: Callable[[str], str]) -> Any:
    """Rebuild plain JSON data with every text in it changed, keys too."""
    # Loops, because a comprehension takes a second frame for each level.
    match plain:
        case str():
            return change(plain)
        case dict():
            entries = {}
            for key, value in plain.items():
                entries[change(key)] = each_text(value, change)
            return entries
        case list() | tuple():
            values = []
            for value in plain:
                values.append(each_text(value, change))  # noqa: PERF401
            return values
    return plain


def _mark(text: str) -> str:
    """Replace each character that cannot be stored by the mark and its code."""
    return _TO_MARK.sub(lambda match: f"{MARK}{ord(match[0]):04x}", text)


def unmark(text: str) -> str:
    """Undo `_mark`."""
    return _MARKED.sub(lambda match: chr(int(match[1], 16)), text)


def _too_deep(text: str) -> str | None:
    """Return why a JSON text is nested too deeply, if it is."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return None
    marks = text.replace("\\\\", "").replace('\\"', "").encode().translate(None, _NEITHER)
    bare = b"".join(marks.replace(b'""', b"").split(b'"')[::2])  # without the brackets inside texts
    depth = max(accumulate(map(_STEPS.__getitem__, bare)), default=0)
    return _nested(f"{depth:,} levels deep") if depth > MAX_DEPTH else None


_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NEITHER = bytes({*range(256)} - _STEPS.keys() - {ord('"')})


def _nested(how: str) -> str:
    return f"the value is nested {how}, the limit is {MAX_DEPTH}: give flatter data, or a reference to it"


def _not_finite(value: Any) -> str | None:
    """Raise if there is a NaN or an infinity, with its path."""
    for path, leaf in _leaves(value, "", ()):
        if isinstance(leaf, float) and not math.isfinite(leaf):
            return f"{path or 'the value'} is {leaf}, which JSON cannot hold: use None, or a text"
    return None


def _rewritten(text: str) -> bool:
    """Return whether a JSON text comes back the same when it is read and written. One with a key twice does not."""
    return _ENCODER.encode(msgspec.json.decode(text)).decode() == text


def _twice(value: Any) -> str | None:
    """Return where two keys become one text, of which a reader would keep one entry."""
    found = ((path, leaf) for path, leaf in _leaves(value, "", ()) if isinstance(leaf, _Twice))
    return next((f"{path or 'the value'} {leaf.why}" for path, leaf in found), None)


def _refusal(value: Any, error: Exception) -> str:
    """Return which part of `value` cannot be stored, and why."""
    try:
        for path, leaf in _leaves(value, "", ()):
            if isinstance(leaf, _Refused):
                return f"{path or 'the value'} {leaf.why}"
            try:
                _text(leaf, _ENCODER)
            except Exception:
                if isinstance(leaf, int):
                    return f"{path or 'the value'} has more than 4,300 digits: give it as a text"
                kind = type(leaf).__name__
                return (
                    f"{path or 'the value'} is of type {kind}, which cannot be stored: "
                    "give plain data, a dataclass or a model, and load the rest in the handler"
                )
    except RecursionError as deep:
        error = deep
    if isinstance(error, RecursionError):
        return _nested("too deeply")
    return f"the value cannot be stored: {error}"


@dataclass(frozen=True, slots=True)
class _Refused:
    """Marks a place where a walk finds something wrong."""

    why: str


class _Twice(_Refused):
    """Marks a dict with two keys that become one text."""


def _leaves(value: Any, path: str, above: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """Give every value that is not a container, with its path."""
    if id(value) in above:
        yield path, _Refused("refers to itself: give data without cycles")
        return
    inside = None if isinstance(value, _Refused) else _inside(value)
    if inside is None:
        yield path, value
        return
    for step, child in inside:
        yield from _leaves(child, f"{path}{step}".removeprefix("."), (*above, id(value)))


def _inside(value: Any) -> Iterator[tuple[str, Any]] | None:
    """Return the steps and values of a container, None for anything else."""
    match value:
        case dict():
            return _entries(value)
        case list() | tuple() | set() | frozenset():
            return ((f"[{n}]", child) for n, child in enumerate(value))
        case msgspec.Struct():
            return ((f".{name}", getattr(value, name)) for name in value.__struct_fields__)
    if is_dataclass(value) and not isinstance(value, type):
        return ((f".{field.name}", getattr(value, field.name, None)) for field in fields(value))
    if hasattr(type(value), "model_dump"):
        return ((f".{name}", child) for name, child in dict(value).items())
    return None


def _entries(value: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Return the steps to a dict's values. Keys that are no texts become texts, which must differ from all others."""
    names = {str.__str__(key) for key in value if isinstance(key, str)}
    for key, child in value.items():
        step, child = _entry(key, child)
        if not isinstance(key, str) and not isinstance(child, _Refused):
            name = next(iter(msgspec.json.decode(_text({key: 0}, _ENCODER))))
            if name in names:
                yield "", _Twice(f"has two keys that become {name!r} in JSON: give them different texts")
            names.add(name)
        yield step, child


def _entry(key: Any, child: Any) -> tuple[str, Any]:
    """Return the step to a dict's value, or the reason why its key is refused."""
    if isinstance(key, str):
        return (f".{key}" if key.isidentifier() else f"[{key!r}]"), child
    try:
        _text({key: 0}, _ENCODER)
    except Exception:
        kind = type(key).__name__
        return "", _Refused(f"has a key of type {kind}, which JSON cannot hold: use texts or numbers as keys")
    return f"[{key!r}]", child


@overload
def decode(text: str, hint: type[T]) -> T: ...
@overload
def decode(text: str, hint: Any) -> Any: ...
def decode(text: str, hint: Any) -> Any:
    """Read JSON text as a value of the type `hint`."""
    try:
        if MARK in text:
            return convert(plain(text), hint)
        return decoder_of(hint).decode(text)
    except UNREADABLE as error:
        raise BadArguments(f"cannot read this as {name_of(hint)}: {located(error, '$')}") from error


def plain(text: str) -> Any:
    """Read JSON text as plain data."""
    data = msgspec.json.decode(text)
    return each_text(data, unmark) if MARK in text else data


def reread(data: Any, hint: Any) -> Any:
    """Read plain data, as a job's record holds it, as a value of the type `hint`."""
    try:
        return convert(data, hint)
    except UNREADABLE as error:
        raise BadArguments(f"cannot read this as {name_of(hint)}: {located(error, '$')}") from error


# A lone surrogate that is read as a number, for example, is a UnicodeEncodeError.
UNREADABLE = (msgspec.MsgspecError, RecursionError, NotImplementedError, UnicodeEncodeError)


def convert(plain: Any, hint: Any) -> Any:
    """Make a value of the type `hint` from plain JSON data."""
    return msgspec.convert(plain, hint, str_keys=True, dec_hook=_from_plain)


def _from_plain(hint: Any, plain: Any) -> Any:
    """Make a type that msgspec does not know from plain JSON data."""
    if isinstance(hint, type) and isinstance(plain, hint):
        return plain
    if not hasattr(hint, "model_validate_json"):
        raise NotImplementedError(f"nothing of type `{name_of(hint)}` can be made from JSON")
    try:
        # As JSON, because a strict model takes a date from JSON text but not from a Python string.
        return hint.model_validate_json(_ENCODER.encode(plain))
    except UnicodeEncodeError:
        return hint.model_validate(plain)
    except ValueError as error:
        raise ValueError(f"Expected `{name_of(hint)}`, got {_complaints(error)}") from error


def _complaints(error: ValueError) -> str:
    """Write pydantic's errors on one line, without the values."""
    listed = getattr(error, "errors", None)
    if listed is None:
        return str(error)
    return "; ".join(f"{'.'.join(map(str, entry['loc'])) or 'value'}: {entry['msg']}" for entry in listed())


def decoder_of(hint: Any) -> msgspec.json.Decoder[Any]:
    """Return the decoder of a type, cached if the type is hashable."""
    try:
        return _remembered(hint)
    except TypeError:  # not hashable, or not supported, which is raised again here
        return msgspec.json.Decoder(hint, dec_hook=_from_plain)


@lru_cache(maxsize=1024)
def _remembered(hint: Any) -> msgspec.json.Decoder[Any]:
    """Make the decoder of a type."""
    return msgspec.json.Decoder(hint, dec_hook=_from_plain)


def name_of(hint: Any) -> str:
    """Return the name of a type as code has it."""
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


def located(error: BaseException, root: str) -> str:
    """Return msgspec's error with its path, in which `root` replaces `$`."""
    if isinstance(error, RecursionError):
        return f"`{root}` is nested too deeply"
    what, _, where = str(error).partition(" - at ")
    path = where.strip("`").replace("`", "").replace("$", root, 1) or root
    return f"`{path}`: {what[:1].lower()}{what[1:]}"


def check_json(text: str, what: str) -> None:
    """Raise if a text is not JSON, before it is stored."""
    try:
        _RAW.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise PayloadError(f"{what} is not JSON ({error}): encode it first, as codec.encode does") from error


_RAW = msgspec.json.Decoder(msgspec.Raw)


def check_size(payload: str, task: str, *, limit: int = MAX_PAYLOAD) -> None:
    """Raise if a payload is too large to be stored inline."""
    if len(payload) <= limit // 4:  # a character is four bytes at most
        return
    size = len(payload) if payload.isascii() else len(payload.encode())
    if size > limit:
        raise PayloadTooLarge(
            f"{task}: the payload has {size:,} bytes, the limit is {limit:,}: store the data and pass a reference to it"
        )
