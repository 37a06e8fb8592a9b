"""Arguments that several calls share: the filters of listings, and the name of the user."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from duly.errors import ConfigError
from duly.rules.checks import count, moment


def checked(filters: Mapping[str, Any], known: type) -> dict[str, Any]:
    """Return filters with moments in milliseconds; raise for filters that do not exist."""
    names = known.__annotations__
    if unknown := [name for name in filters if name not in names]:
        raise ConfigError(f"there is no filter {unknown[0]}=: the filters are {', '.join(names)}")
    read = dict(filters)
    for name in ("since", "until"):
        if isinstance(at := read.get(name), datetime):
            read[name] = moment(at, f"{name}=")
    count(read.get("limit", 1), "limit=")
    return read


def user() -> str:
    """Return the name of the user who runs this process, for the audit log."""
    import getpass  # few calls need it, and it loads a library

    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container may have no user name; Windows lacks the module
        return "unknown"
