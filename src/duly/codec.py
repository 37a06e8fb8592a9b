"""Python values as JSON text and back, typed by the annotations of whoever reads them.

Two characters make a database refuse a text for ever: NUL (PostgreSQL cannot parse it even as an escape in
JSON) and lone surrogates (they are no UTF-8). In payloads they are stored as `␛0000`, `␛dc80`, and `␛` itself
as `␛241b`, which is undone on reading; in errors and messages, which only people read, `escape_text` makes
them visible for good.
"""

from __future__ import annotations

import inspect
import math
import re
import traceback
import types
import typing
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, TypeVar, overload

import msgspec

from duly.errors import BadArguments, ConfigError, PayloadError, PayloadTooLarge
from duly.model import Failure

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

T = TypeVar("T")

MAX_PAYLOAD = 96_000
MAX_MESSAGE = 8 * 1024
MAX_TRACEBACK = 32 * 1024

_MARK = "␛"
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
_TO_MARK = re.compile(f"[\x00\ud800-\udfff{_MARK}]")
_MARKED = re.compile(f"{_MARK}([0-9a-f]{{4}})")


def encode(value: Any, *, sets: bool = False) -> str:
    """Write `value` as JSON text that every store can keep.

    With `sets`, whatever has no order is sorted: a set's order differs between processes, and a keyed job's
    payload must not.
    """
    encoder = _SORTED if sets else _ENCODER
    try:
        text = _text(value, encoder)
        # The encoder writes NaN and infinity as null, so only a text with a null has to be looked through.
        found = _not_finite(value) if "null" in text else None
    except Exception as error:
        raise PayloadError(_refusal(value, error)) from error
    if found:
        raise PayloadError(found)
    return text


def _text(value: Any, encoder: msgspec.json.Encoder) -> str:
    """Encode, taking the slow way only for a value that holds what has to be marked."""
    try:
        text = encoder.encode(value).decode()
        if "\\u0000" not in text and _MARK not in text:
            return text
    except UnicodeEncodeError:
        pass  # a lone surrogate
    order: Any = "deterministic" if encoder is _SORTED else None
    plain = msgspec.to_builtins(value, str_keys=True, enc_hook=_to_plain, order=order)
    return encoder.encode(_each_text(plain, _mark)).decode()


def _to_plain(value: Any) -> Any:
    """Turn what msgspec does not know into what it does, or say that it cannot be stored."""
    if hasattr(type(value), "model_dump"):  # pydantic, which we do not import
        return value.model_dump(mode="json", by_alias=True, round_trip=True, warnings=False)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    raise NotImplementedError


_ENCODER = msgspec.json.Encoder(enc_hook=_to_plain)
_SORTED = msgspec.json.Encoder(enc_hook=_to_plain, order="deterministic")


def _each_text(plain: Any, change: Callable[[str], str]) -> Any:
    """Rebuild plain JSON data with every text in it changed, keys too."""
    match plain:
        case str():
            return change(plain)
        case dict():
            return {change(key): _each_text(value, change) for key, value in plain.items()}
        case list() | tuple():
            return [_each_text(value, change) for value in plain]
    return plain


def _mark(text: str) -> str:
    """Replace each character that cannot be stored by the mark and its code."""
    return _TO_MARK.sub(lambda match: f"{_MARK}{ord(match[0]):04x}", text)


def _unmark(text: str) -> str:
    """Undo `_mark`."""
    return _MARKED.sub(lambda match: chr(int(match[1], 16)), text)


def _not_finite(value: Any) -> str | None:
    """Say where a NaN or an infinity is, if there is one."""
    for path, leaf in _leaves(value, "", ()):
        if isinstance(leaf, float) and not math.isfinite(leaf):
            return f"{path or 'the value'} is {leaf}, which JSON cannot hold: use None, or a text"
    return None


def _refusal(value: Any, error: Exception) -> str:
    """Say which part of `value` cannot be stored, and why."""
    try:
        for path, leaf in _leaves(value, "", ()):
            if isinstance(leaf, _Refused):
                return f"{path or 'the value'} {leaf.why}"
            try:
                _text(leaf, _ENCODER)
            except Exception:
                kind = type(leaf).__name__
                return (
                    f"{path or 'the value'} is of type {kind}, which cannot be stored: "
                    "give plain data, a dataclass or a model, and load the rest in the handler"
                )
    except RecursionError as deep:
        error = deep
    if isinstance(error, RecursionError):
        return "the value is nested too deeply to be stored: give flatter data, or a reference to it"
    return f"the value cannot be stored: {error}"


@dataclass(frozen=True, slots=True)
class _Refused:
    """Stands where a walk meets something that is wrong by its place."""

    why: str


def _leaves(value: Any, path: str, above: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """Walk to every value that holds no other, with its path."""
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
    """Give the steps and values of a container, None for anything else."""
    match value:
        case dict():
            return (_entry(key, child) for key, child in value.items())
        case list() | tuple() | set() | frozenset():
            return ((f"[{n}]", child) for n, child in enumerate(value))
        case msgspec.Struct():
            return ((f".{name}", getattr(value, name)) for name in value.__struct_fields__)
    if is_dataclass(value) and not isinstance(value, type):
        return ((f".{field.name}", getattr(value, field.name, None)) for field in fields(value))
    if hasattr(type(value), "model_dump"):
        return ((f".{name}", child) for name, child in dict(value).items())
    return None


def _entry(key: Any, child: Any) -> tuple[str, Any]:
    """Give the step to a dict's value, or the reason why its key is refused."""
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
        if _MARK in text:
            return _convert(_each_text(msgspec.json.decode(text), _unmark), hint)
        return _decoder(hint).decode(text)
    except _UNREADABLE as error:
        raise BadArguments(f"cannot read this as {_name(hint)}: {_located(error, '$')}") from error


_UNREADABLE = (msgspec.MsgspecError, RecursionError, NotImplementedError)


def _convert(plain: Any, hint: Any) -> Any:
    """Make a value of the type `hint` from plain JSON data."""
    return msgspec.convert(plain, hint, str_keys=True, dec_hook=_from_plain)


def _from_plain(hint: Any, plain: Any) -> Any:
    """Make what msgspec does not know from plain JSON data."""
    if isinstance(hint, type) and isinstance(plain, hint):
        return plain
    if not hasattr(hint, "model_validate_json"):
        raise NotImplementedError(f"nothing of type `{_name(hint)}` can be made from JSON")
    try:
        # As JSON, because a strict model takes a date from JSON text but not from a Python string.
        return hint.model_validate_json(_ENCODER.encode(plain))
    except UnicodeEncodeError:
        return hint.model_validate(plain)
    except ValueError as error:
        raise ValueError(f"Expected `{_name(hint)}`, got {_complaints(error)}") from error


def _complaints(error: ValueError) -> str:
    """Put pydantic's list of what is wrong on one line, without the values."""
    listed = getattr(error, "errors", None)
    if listed is None:
        return str(error)
    return "; ".join(f"{'.'.join(map(str, entry['loc'])) or 'value'}: {entry['msg']}" for entry in listed())


def _decoder(hint: Any) -> msgspec.json.Decoder[Any]:
    """Give the decoder of a type, the same one each time where the type can be remembered."""
    try:
        return _remembered(hint)
    except TypeError:  # not hashable, or not supported: the latter is raised again here
        return msgspec.json.Decoder(hint, dec_hook=_from_plain)


@lru_cache(maxsize=1024)
def _remembered(hint: Any) -> msgspec.json.Decoder[Any]:
    """Make the decoder of a type."""
    return msgspec.json.Decoder(hint, dec_hook=_from_plain)


def _name(hint: Any) -> str:
    """Name a type as one would write it."""
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


def _located(error: BaseException, root: str) -> str:
    """Say msgspec's complaint with its path, `$` replaced by what it stands for."""
    if isinstance(error, RecursionError):
        return f"`{root}` is nested too deeply"
    what, _, where = str(error).partition(" - at ")
    path = where.strip("`").replace("`", "").replace("$", root, 1) or root
    return f"`{path}`: {what[:1].lower()}{what[1:]}"


@dataclass(frozen=True, slots=True)
class _Parameter:
    """One parameter of a handler: what it takes, and how that is read."""

    name: str
    kind: inspect._ParameterKind
    default: Any
    hint: Any
    decoder: msgspec.json.Decoder[Any]


@dataclass(frozen=True, slots=True)
class SignatureCodec:
    """Turns the arguments of one handler into a payload and back."""

    task: str
    signature: inspect.Signature
    shape: str
    named: Mapping[str, _Parameter]
    star: _Parameter | None
    stars: _Parameter | None
    plain: bool
    sets: bool

    def encode_call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Write a call's arguments as a JSON object of names to values; wrong ones are refused."""
        given = self._flat(args, kwargs)
        try:
            text = encode(given, sets=self.sets)
        except PayloadError as error:
            raise BadArguments(f"{self.task}: {error}") from error
        # Reading it back is the surest way to know that the worker will be able to.
        self.decode_call(text)
        for name, value in given.items():
            self._refuse_disguised(self._reader(name), name, value)
        return text

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Give a call's arguments by name, defaults filled in; a key function is called with these."""
        bound = self._bind(args, kwargs)
        bound.apply_defaults()
        return self._merged(bound.arguments)

    def decode_call(self, text: str) -> tuple[list[Any], dict[str, Any]]:
        """Read a payload as the positional and keyword arguments of the handler."""
        values = self._values(text)
        starred = values.pop(self.star.name, []) if self.star else []
        args: list[Any] = []
        for parameter in self.named.values():
            if not (parameter.kind is parameter.kind.POSITIONAL_ONLY or (starred and _leads(parameter))):
                continue
            if parameter.name in values:
                args.append(values.pop(parameter.name))
            elif parameter.default is not inspect.Parameter.empty:
                args.append(parameter.default)
        return [*args, *starred], values

    def _flat(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Name the given arguments, those of `*args` as a list, those of `**kwargs` beside the others."""
        # Most calls give every argument by position; binding them this way takes a tenth of the time.
        if self.plain and not kwargs and len(args) == len(self.named):
            return dict(zip(self.named, args, strict=True))
        return self._merged(self._bind(args, kwargs).arguments)

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        """Match arguments to parameters as a call would."""
        try:
            return self.signature.bind(*args, **kwargs)
        except TypeError as error:
            unknown = [name for name in kwargs if name not in self.named and not self.stars]
            raise BadArguments(f"{self.task}{self.shape}: {error}{_meant(unknown, self.named)}") from None

    def _merged(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Put what `**kwargs` holds beside the other arguments."""
        flat = dict(arguments)
        if self.stars is None:
            return flat
        extra: dict[str, Any] = flat.pop(self.stars.name, {})
        taken = {*self.named, *([self.star.name] if self.star else [])}
        if clash := sorted(taken & extra.keys()):
            raise BadArguments(
                f"{self.task}: `{clash[0]}` in `**{self.stars.name}` names another parameter too: rename it"
            )
        return flat | extra

    def _values(self, text: str) -> dict[str, Any]:
        """Read every value of a payload by the annotation of its parameter."""
        try:
            raw = _RAW.decode(text)
        except _UNREADABLE as error:
            raise BadArguments(f"{self.task}: the payload is not a JSON object: {_located(error, '$')}") from error
        self._refuse_misfit(raw)
        marked = _MARK in text
        values = {}
        for name, part in raw.items():
            reader = self._reader(name)
            try:
                if marked:
                    plain = _each_text(msgspec.json.decode(part), _unmark)
                    values[_unmark(name)] = _convert(plain, reader.hint)
                else:
                    values[name] = reader.decoder.decode(part)
            except _UNREADABLE as error:
                raise BadArguments(
                    f"{self.task}: argument {_located(error, name)} (`{name}` is {_name(reader.hint)})"
                ) from error
        return values

    def _refuse_misfit(self, raw: Mapping[str, Any]) -> None:
        """Refuse a payload with names the handler does not take, or without one that it needs."""
        for name, parameter in self.named.items():
            if name not in raw and parameter.default is inspect.Parameter.empty:
                raise BadArguments(f"{self.task}{self.shape}: argument `{name}` ({_name(parameter.hint)}) is missing")
        if self.stars:
            return
        known = {*self.named, *([self.star.name] if self.star else [])}
        if unknown := [name for name in raw if name not in known]:
            raise BadArguments(f"{self.task}{self.shape}: there is no argument `{unknown[0]}`{_meant(unknown, known)}")

    def _reader(self, name: str) -> _Parameter:
        """Find the parameter that takes the argument called `name`."""
        if self.star and self.star.name == name:
            return self.star
        parameter = self.named.get(name, self.stars)
        assert parameter is not None, "names that nothing takes are refused before they are read"
        return parameter

    def _refuse_disguised(self, reader: _Parameter, name: str, value: Any) -> None:
        """Refuse what JSON would quietly turn into a text: a date or bytes where a `str` is wanted."""
        try:
            _convert(value, reader.hint)
        except msgspec.ValidationError as error:
            # Anything else it finds passed as JSON, such as a subclass of float.
            if _DISGUISED.search(str(error)):
                raise BadArguments(
                    f"{self.task}: argument {_located(error, name)} (`{name}` is {_name(reader.hint)})"
                ) from error
        except NotImplementedError:
            pass


_RAW = msgspec.json.Decoder(dict[str, msgspec.Raw])
_DISGUISED = re.compile(r"got `(bytes|bytearray|memoryview|datetime|date|time|duration|timedelta|decimal|uuid)`")


def _leads(parameter: _Parameter) -> bool:
    """Say whether a parameter can be given by position."""
    return parameter.kind in (parameter.kind.POSITIONAL_ONLY, parameter.kind.POSITIONAL_OR_KEYWORD)


def _meant(unknown: Sequence[str], known: Mapping[str, Any] | set[str]) -> str:
    """Suggest a known name for the first unknown one."""
    close = get_close_matches(unknown[0], known, 1) if unknown else []
    return f"; instead of `{unknown[0]}` did you mean `{close[0]}`?" if close else ""


def signature_codec(handler: Callable[..., Any], *, skip_first: bool = False) -> SignatureCodec:
    """Compile the codec of a handler; `skip_first` leaves its context parameter out."""
    signature = inspect.signature(handler)
    parameters = list(signature.parameters.values())[int(skip_first) :]
    compiled = [_parameter(handler, parameter) for parameter in parameters]
    by_kind = {parameter.kind: parameter for parameter in compiled}
    varied = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return SignatureCodec(
        task=handler.__name__,
        signature=signature.replace(parameters=parameters),
        shape=f"({', '.join(map(_bare, parameters))})",
        named={parameter.name: parameter for parameter in compiled if parameter.kind not in varied},
        star=by_kind.get(inspect.Parameter.VAR_POSITIONAL),
        stars=by_kind.get(inspect.Parameter.VAR_KEYWORD),
        plain=all(_leads(parameter) for parameter in compiled),
        sets=any(_holds_set(parameter.hint) for parameter in compiled),
    )


def _bare(parameter: inspect.Parameter) -> str:
    """Show a parameter by its name, with its stars; a default may be a secret."""
    return str(parameter.replace(annotation=parameter.empty, default=parameter.empty))


def _parameter(handler: Callable[..., Any], parameter: inspect.Parameter) -> _Parameter:
    """Compile one parameter, refusing an annotation that JSON cannot serve."""
    hint = _hint(handler, parameter.name)
    if parameter.kind is parameter.VAR_POSITIONAL:
        hint = list[hint]  # type: ignore[valid-type]
    try:
        decoder = _decoder(hint)
    except TypeError as error:
        raise ConfigError(
            f"{handler.__name__}: parameter `{parameter.name}` is annotated {_name(hint)}, which cannot be "
            f"read back from JSON ({error}): choose a type that can, or leave it out and take plain JSON"
        ) from error
    return _Parameter(parameter.name, parameter.kind, parameter.default, hint, decoder)


def result_type(handler: Callable[..., Any]) -> Any:
    """Give the type that a handler's result is read as, Any when it names none that can be found."""
    try:
        return _hint(handler, "return")
    except ConfigError:
        return Any


def _hint(handler: Callable[..., Any], name: str) -> Any:
    """Resolve one annotation by itself, so that one of no interest to us may be unknown here."""
    function = inspect.unwrap(handler)
    annotations = getattr(function, "__annotations__", {})
    if name not in annotations:
        return Any
    alone = types.SimpleNamespace(__annotations__={name: annotations[name]})
    try:
        hints = typing.get_type_hints(
            alone,
            globalns=getattr(function, "__globals__", {}),
            localns=_around(function),
            include_extras=True,
        )
    except NameError as error:
        raise ConfigError(
            f"{handler.__name__}: the annotation of `{name}` is unknown here ({error}): define or import "
            "the name at the top of the module, outside `if TYPE_CHECKING`"
        ) from error
    return hints[name]


def _around(function: Any) -> dict[str, Any]:
    """Give the names a nested function takes from around it; its own is not set yet when it is decorated."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    around = {}
    for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=False):
        with suppress(ValueError):
            around[name] = cell.cell_contents
    return around


def _holds_set(hint: Any) -> bool:
    """Say whether a value of this type can hold a set."""
    return "SetType(" in repr(msgspec.inspect.type_info(hint))


def check_size(payload: str, task: str, *, limit: int = MAX_PAYLOAD) -> None:
    """Refuse a payload that is too large to travel inline."""
    size = len(payload) if payload.isascii() else len(payload.encode())
    if size > limit:
        raise PayloadTooLarge(
            f"{task}: the payload has {size:,} bytes, the limit is {limit:,}: store the data and pass a "
            "reference to it, or set a blob store"
        )


def describe(error: BaseException) -> Failure:
    """Put an exception into texts that can be stored, whatever it does when asked for them."""
    kind = type(error).__qualname__
    if type(error).__module__ not in ("builtins", "__main__"):
        kind = f"{type(error).__module__}.{kind}"
    message = _said(lambda: str(error)) or ""
    return Failure(kind, _fit(message, MAX_MESSAGE), _fit(_traceback(error), MAX_TRACEBACK))


def _said(say: Callable[[], str]) -> str:
    """Ask for a text, or tell why there is none."""
    try:
        return say()
    except Exception as error:
        return f"<no text: asking for it raised {type(error).__name__}>"


def _traceback(error: BaseException) -> str:
    """Format the traceback with its causes, or without them when that fails."""
    try:
        return "".join(traceback.format_exception(error))
    except Exception:
        return _said(lambda: "".join(traceback.format_tb(error.__traceback__)))


def _fit(text: str, limit_bytes: int) -> str:
    """Clip and escape; clip first, because escaping a huge text is slow, and after, because it grows."""
    return clip(escape_text(clip(text, limit_bytes)), limit_bytes)


def escape_text(text: str) -> str:
    """Make NUL and lone surrogates visible, which no database stores."""
    if text.isascii() and "\x00" not in text:
        return text
    return _UNSTORABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def clip(text: str, limit_bytes: int) -> str:
    """Keep the head and the tail of a text that is over the limit, and say how much was cut."""
    if text.isascii() and len(text) <= limit_bytes:
        return text
    data = text.encode("utf-8", "backslashreplace")  # shows lone surrogates as `escape_text` does
    if len(data) <= limit_bytes:
        return data.decode()
    room = limit_bytes - len(_cut(len(data)))
    if room < 0:
        return data[: _boundary(data, max(limit_bytes, 0))].decode()
    head = data[: _boundary(data, room - room // 2)]
    tail = data[_boundary(data, len(data) - room // 2, step=1) :]
    return (head + _cut(len(data) - len(head) - len(tail)) + tail).decode()


def _cut(count: int) -> bytes:
    """Say how many bytes are missing here."""
    return f"… {count} bytes cut …".encode()


def _boundary(data: bytes, at: int, *, step: int = -1) -> int:
    """Move from `at` to where no character is cut in two."""
    while 0 < at < len(data) and data[at] & 0xC0 == 0x80:
        at += step
    return at
