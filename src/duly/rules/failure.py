"""Errors as texts that can be stored: escaped and clipped, even if the exception cannot be printed."""

from __future__ import annotations

import re
import traceback
from typing import TYPE_CHECKING

from duly.model import Failure

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_MESSAGE = 8 * 1024
MAX_TRACEBACK = 32 * 1024

_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


def describe(error: BaseException, *, called_by: str = "") -> Failure:
    """Return the texts of an exception, even if its own methods raise.

    `called_by` is the file that called the handler: the traceback begins below its lines, which do not help the reader.
    """
    kind = type(error).__qualname__
    if type(error).__module__ not in ("builtins", "__main__"):
        kind = f"{type(error).__module__}.{kind}"
    message = _said(lambda: str(error)) or ""
    return Failure(kind, _fit(message, MAX_MESSAGE), _fit(_traceback(error, called_by), MAX_TRACEBACK))


def _said(say: Callable[[], str]) -> str:
    """Return a text of the exception, or why it has none."""
    try:
        return say()
    except BaseException as error:
        return f"<no text: asking for it raised {type(error).__name__}>"


def _traceback(error: BaseException, called_by: str) -> str:
    """Format the traceback with its causes, or without them when that fails."""
    begin = None
    try:
        begin = error.__traceback__
        while begin is not None and begin.tb_next is not None and begin.tb_frame.f_code.co_filename == called_by:
            begin = begin.tb_next
        return "".join(traceback.format_exception(type(error), error, begin))
    except Exception:
        return _said(lambda: "".join(traceback.format_tb(begin)))


def _fit(text: str, limit_bytes: int) -> str:
    """Clip and escape; clip first, because escaping a huge text is slow, and after, because it grows."""
    return clip(escape_text(clip(text, limit_bytes)), limit_bytes)


def escape_text(text: str) -> str:
    """Replace NUL and lone surrogates, which no database stores, by visible texts."""
    if text.isascii() and "\x00" not in text:
        return text
    return _UNSTORABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def clip(text: str, limit_bytes: int) -> str:
    """Keep the head and the tail of a text that is over the limit, with the number of bytes cut."""
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
    """Write how many bytes are missing here."""
    return f"… {count} bytes cut …".encode()


def _boundary(data: bytes, at: int, *, step: int = -1) -> int:
    """Move from `at` to the boundary of a character."""
    while 0 < at < len(data) and data[at] & 0xC0 == 0x80:
        at += step
    return at
