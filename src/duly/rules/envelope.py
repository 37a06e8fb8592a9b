"""The envelope of a job: ids and labels that a child inherits from its parent, stored as compact text."""

from __future__ import annotations

import re
from typing import Any

from msgspec.structs import replace

from duly.errors import BadArguments, ConfigError
from duly.model import Envelope
from duly.rules import codec

_DEFAULTS = Envelope()
_NAMES = Envelope.__struct_fields__
_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.+)?")


def child_of(parent: Envelope, parent_id: str, **overrides: Any) -> Envelope:
    """Make the envelope of a job caused by the job `parent_id`; `overrides` win."""
    inherited = Envelope(
        correlation_id=parent.correlation_id or parent_id,
        causation_id=parent_id,
        subject=parent.subject,
        traceparent=parent.traceparent,
    )
    child = replace(inherited, **overrides)
    check_traceparent(child.traceparent)
    return child


def check_traceparent(text: str | None) -> None:
    """Raise unless it is a W3C traceparent."""
    if text is None:
        return
    match = _TRACEPARENT.fullmatch(text)
    # Version 00 is exactly four parts; later versions may add more.
    if match is None or (match[1] == "00" and match[2]):
        raise ConfigError(
            f"traceparent is {text[:80]!r}, which is not one: give '00-<32 hex>-<16 hex>-<2 hex>' "
            "in lower case with ids that are not all zero, or leave it out"
        )


def pack(envelope: Envelope) -> str | None:
    """Write the fields that differ from their defaults as JSON text; returns None if all are defaults."""
    if envelope == _DEFAULTS:
        return None
    check_traceparent(envelope.traceparent)
    pairs = ((name, getattr(envelope, name)) for name in _NAMES)
    return codec.encode({name: value for name, value in pairs if value != getattr(_DEFAULTS, name)})


def unpack(text: str | None) -> Envelope:
    """Read the text of `pack`; unknown fields are ignored, because a newer version may write more."""
    if not text:
        return _DEFAULTS
    try:
        return codec.decode(text, Envelope)
    except BadArguments:  # written by hand: one such row must not break its reader
        return _DEFAULTS
