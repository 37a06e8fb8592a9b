"""The arguments of a handler as a payload and back, checked against its annotations.

Compiled once per task. A payload is decoded once when it is written, because then the worker can decode it too. Plain
numbers and texts need no such check.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import msgspec

from duly.errors import BadArguments, ConfigError, PayloadError
from duly.rules import codec

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class _Parameter:
    """One parameter of a handler, and the decoder of its values."""

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
    # Reads a payload with exactly all arguments in one step; None if the handler allows no such call.
    whole: msgspec.json.Decoder[Any] | None
    # The types of all arguments, if each is decoded to an equal value.
    simple: tuple[type, ...] | None

    def encode_call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Write a call's arguments as a JSON object of names to values; raise if some do not fit."""
        if not kwargs and tuple(map(type, args)) == self.simple and self.whole is not None:
            text = codec.encode_simple(self.whole.type, args)
            if text is not None:
                return text
        given = self._flat(args, kwargs)
        try:
            text = codec.encode(given, sets=self.sets)
        except PayloadError as error:
            raise BadArguments(f"{self.task}: {error}") from error
        # Decoding it now shows that the worker can decode it.
        if not self._is_whole(text):
            self.decode_call(text)
        for name, value in given.items():
            if type(value) not in _UNDISGUISED:
                self._refuse_disguised(self._reader(name), name, value)
        return text

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return a call's arguments by name with defaults, as key functions get them."""
        bound = self._bind(args, kwargs)
        bound.apply_defaults()
        return self._merged(bound.arguments)

    def decode_call(self, text: str) -> tuple[list[Any], dict[str, Any]]:
        """Read a payload as the positional and keyword arguments of the handler."""
        if self.whole is not None and codec.MARK not in text:
            try:
                return [], msgspec.structs.asdict(self.whole.decode(text))
            except codec.UNREADABLE:  # an argument is missing or wrong: the checks below name it
                pass
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

    def _is_whole(self, text: str) -> bool:
        """Return whether a payload has exactly all arguments and can be decoded."""
        try:
            return self.whole is not None and codec.MARK not in text and self.whole.decode(text) is not None
        except codec.UNREADABLE:
            return False

    def _flat(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Name the given arguments, those of `*args` as a list, those of `**kwargs` beside the others."""
        # Most calls give every argument by position; binding them this way takes a tenth of the time.
        if self.plain and not kwargs and len(args) == len(self.named):
            return dict(zip(self.named, args))  # noqa: B905 (as many as there are names; to look again takes as long)
        return self._merged(self._bind(args, kwargs).arguments)

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        """Match arguments to parameters as a call would."""
        try:
            return self.signature.bind(*args, **kwargs)
        except TypeError as error:
            unknown = [name for name in kwargs if name not in self.named and not self.stars]
            raise BadArguments(f"{self.task}{self.shape}: {error}{_meant(unknown, self.named)}") from None

    def _merged(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Merge `**kwargs` into the other arguments."""
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
        except codec.UNREADABLE as error:
            raise BadArguments(f"{self.task}: the payload is not a JSON object: {codec.located(error, '$')}") from error
        self._refuse_misfit(raw)
        marked = codec.MARK in text
        values = {}
        for name, part in raw.items():
            reader = self._reader(name)
            try:
                if marked:
                    values[codec.unmark(name)] = codec.convert(codec.plain(bytes(part).decode()), reader.hint)
                else:
                    values[name] = reader.decoder.decode(part)
            except codec.UNREADABLE as error:
                raise BadArguments(
                    f"{self.task}: argument {codec.located(error, name)} (`{name}` is {codec.name_of(reader.hint)})"
                ) from error
        return values

    def _refuse_misfit(self, raw: Mapping[str, Any]) -> None:
        """Raise for names that the handler does not take, and for missing ones."""
        for name, parameter in self.named.items():
            if name not in raw and parameter.default is inspect.Parameter.empty:
                raise BadArguments(
                    f"{self.task}{self.shape}: argument `{name}` ({codec.name_of(parameter.hint)}) is missing"
                )
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
        """Raise for a value that JSON would silently turn into text: a date or bytes where a `str` is expected."""
        try:
            codec.convert(value, reader.hint)
        except msgspec.ValidationError as error:
            # Anything else it finds passed as JSON, such as a subclass of float.
            if _DISGUISED.search(str(error)):
                raise BadArguments(
                    f"{self.task}: argument {codec.located(error, name)} (`{name}` is {codec.name_of(reader.hint)})"
                ) from error
        except NotImplementedError:
            pass


_RAW = msgspec.json.Decoder(dict[str, msgspec.Raw])
_SIMPLE = (int, str, bool, float)
_UNDISGUISED = frozenset({str, int, float, bool, type(None)})
_DISGUISED = re.compile(r"got `(bytes|bytearray|memoryview|datetime|date|time|duration|timedelta|decimal|uuid)`")


def _leads(parameter: _Parameter) -> bool:
    """Return whether a parameter can be given by position."""
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
        whole=_whole(compiled),
        simple=_simple(compiled),
    )


def _whole(parameters: Sequence[_Parameter]) -> msgspec.json.Decoder[Any] | None:
    """Compile the decoder of a call with every argument, where all can be given by name."""
    if any(
        parameter.kind not in (parameter.kind.POSITIONAL_OR_KEYWORD, parameter.kind.KEYWORD_ONLY)
        for parameter in parameters
    ):
        return None
    fields = [(parameter.name, parameter.hint) for parameter in parameters]
    try:
        return codec.decoder_of(msgspec.defstruct("Arguments", fields, forbid_unknown_fields=True))
    except (TypeError, ValueError, RuntimeError):  # a name or a type that is valid alone, but not in a struct
        return None


def _simple(parameters: Sequence[_Parameter]) -> tuple[type, ...] | None:
    """Return the types of positional arguments, if values of these types need no other check."""
    if all(_leads(parameter) and parameter.hint in _SIMPLE for parameter in parameters):
        return tuple(parameter.hint for parameter in parameters)
    return None


def _bare(parameter: inspect.Parameter) -> str:
    """Show a parameter by its name, with its stars; a default may be a secret."""
    return str(parameter.replace(annotation=parameter.empty, default=parameter.empty))


def _parameter(handler: Callable[..., Any], parameter: inspect.Parameter) -> _Parameter:
    """Compile one parameter; raise for an annotation that JSON cannot represent."""
    hint = hint_of(handler, parameter.name)
    if parameter.kind is parameter.VAR_POSITIONAL:
        hint = list[hint]  # type: ignore[valid-type]
    try:
        decoder = codec.decoder_of(hint)
    except TypeError as error:
        raise ConfigError(
            f"{handler.__name__}: parameter `{parameter.name}` is annotated {codec.name_of(hint)}, which cannot be "
            f"read from JSON ({error}). Choose a type that can, or leave it out and take plain JSON"
        ) from error
    return _Parameter(parameter.name, parameter.kind, parameter.default, hint, decoder)


def result_type(handler: Callable[..., Any]) -> Any:
    """Return the type of a handler's result, Any if it has no annotation that can be resolved."""
    try:
        return hint_of(handler, "return")
    except ConfigError:
        return Any


def hint_of(handler: Callable[..., Any], name: str) -> Any:
    """Resolve one annotation alone, because others may be unknown here and need not be known."""
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
    """Return the names that a nested function takes from around it; its own is not set while it is decorated."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    around = {}
    for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=False):
        with suppress(ValueError):
            around[name] = cell.cell_contents
    return around


def _holds_set(hint: Any) -> bool:
    """Return whether a value of this type can contain a set."""
    return "SetType(" in repr(msgspec.inspect.type_info(hint))
