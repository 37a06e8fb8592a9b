"""Reads JSON that a user gives to a command, and refuses what would be lost or cannot be stored."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from duly.errors import ConfigError


def read_json(text: str, what: str, how: str) -> Any:
    """Read a JSON text; the error for another text ends with `how` to write it."""

    def entries(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"{what} has the name {twice!r} twice in one object: give it once")
        return found

    def refuse_constant(name: str) -> NoReturn:
        raise ConfigError(f"{what} has {name} in it, which is not JSON: use null, or a text")

    try:
        return json.loads(text, parse_constant=refuse_constant, object_pairs_hook=entries)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{what} is not JSON: {_place(error)}. {how}") from None
    except RecursionError:
        raise ConfigError(f"{what} is not JSON that can be used: it is nested too deeply") from None
    except ValueError:
        digits = sys.get_int_max_str_digits()
        raise ConfigError(f"{what} has a number of more than {digits:,} digits: give it as a text") from None


def _place(error: json.JSONDecodeError) -> str:
    line = f"line {error.lineno}, " if "\n" in error.doc else ""
    rest = error.doc[error.pos : error.pos + 20].partition("\n")[0]
    return f"{error.msg[:1].lower()}{error.msg[1:]} at {line}column {error.colno}, " + (
        f"before {rest!r}" if rest else "where it ends"
    )
