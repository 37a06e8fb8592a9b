"""Which jobs or batches a listing is asked for, as people say it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from duly.errors import ConfigError
from duly.rules.checks import moment


def checked(filters: Mapping[str, Any], known: type) -> dict[str, Any]:
    """Refuse filters that do not exist, and write moments as the database does."""
    names = known.__annotations__
    if unknown := [name for name in filters if name not in names]:
        raise ConfigError(f"there is no filter {unknown[0]}=: the filters are {', '.join(names)}")
    said = dict(filters)
    for name in ("since", "until"):
        if isinstance(at := said.get(name), datetime):
            said[name] = moment(at, f"{name}=")
    limit = said.get("limit", 1)
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise ConfigError(f"limit= is {limit!r}: give a whole number, 1 or more")
    return said
