"""Configures logging for commands: readable lines, or a JSON object in each line."""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

LEVELS = ("debug", "info", "warning", "error")
COLOURS = {"debug": "2", "info": "32", "warning": "33", "error": "31", "critical": "31"}
# The fields of every record; all others were given as `extra`.
PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
# Fields that the first lines have already printed.
SAID_BEFORE = {"worker.started": frozenset({"queues", "tasks", "concurrency"})}


def configure(level: str, *, as_json: bool, quiet: tuple[str, ...] = (), stream: TextIO | None = None) -> None:
    """Log to stderr: events of duly from `level` on, those of other libraries from INFO on.

    Events of duly whose name begins with one of `quiet` are omitted: they are printed in another way.
    """
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines() if as_json else Lines(colour=stream.isatty() and not os.environ.get("NO_COLOR")))
    handler.addFilter(lambda record: not (record.name.startswith("duly.") and record.msg.startswith(quiet)))
    number = logging.getLevelNamesMapping()[level.upper()]
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(max(number, logging.INFO))
    logging.getLogger("duly").setLevel(number)
    logging.captureWarnings(True)


class Lines(logging.Formatter):
    """`HH:MM:SS level event key=value …`."""

    def __init__(self, *, colour: bool = False) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        """Write a record as one line, and its traceback below."""
        moment = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        level = record.levelname.lower()
        shown = f"\x1b[{COLOURS.get(level, '0')}m{level:<7}\x1b[0m" if self._colour else f"{level:<7}"
        message = _message(record)
        said = SAID_BEFORE.get(message, frozenset())
        extra = {name: value for name, value in _extra(record).items() if value is not None and name not in said}
        fields = "".join(f" {name}={_shown(value)}" for name, value in extra.items())
        line = f"{moment} {shown} {message}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonLines(logging.Formatter):
    """One JSON object a line, with every field, also those that are null."""

    def format(self, record: logging.LogRecord) -> str:
        """Write a record as one line."""
        said: dict[str, Any] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": _message(record),
            "logger": record.name,
            "pid": record.process,
        }
        said |= {name if name not in said else f"{name}_": value for name, value in _extra(record).items()}
        if record.exc_info:
            said["traceback"] = self.formatException(record.exc_info)
        return json.dumps(said, default=str)


def _message(record: logging.LogRecord) -> str:
    return record.getMessage().rstrip()


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in PLAIN}


def _shown(value: Any) -> str:
    """Write a value so that it has no blanks, or is in quotes."""
    if isinstance(value, dict):
        value = ",".join(name if limit is None else f"{name}:{limit}" for name, limit in value.items())
    elif isinstance(value, list | tuple | set):
        value = ",".join(map(str, value))
    text = str(value)
    if text and text.isprintable() and not set(text) & {" ", '"', "="}:
        return text
    return json.dumps(text, ensure_ascii=False)
