"""The options that `task.using(…)` changes for what is enqueued through it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from msgspec import Struct

from duly.app.define import Readers, attempts, key, ms, read_terms, span
from duly.app.definition import Definition
from duly.app.enqueue import Adds
from duly.errors import ConfigError
from duly.rules import keys
from duly.rules.checks import moment, named, whole

# A term replaces its rival: the last `using` wins.
RIVALS = {"delay_ms": "due_at", "due_at": "delay_ms", "expires_ms": "expires_at", "expires_at": "expires_ms"}


class Using(Struct, frozen=True):
    """The options of one enqueue that differ from the task's definition."""

    terms: Mapping[str, Any] = {}
    key: keys.Key | None = None
    subject: str | None = None
    correlation_id: str | None = None
    conn: Any = None
    batch: Adds | None = None
    app: Any = None

    def changed(self, definition: Definition, given: Mapping[str, Any]) -> Using:
        """Return these options with those that were given in their place; raise for options that cannot work."""
        name = definition.name
        if "delay" in given and "at" in given:
            raise ConfigError(f"{name}: give delay= or at=, not both")
        _check_types(name, given)
        new = _terms(name, given)
        kept = {term: value for term, value in self.terms.items() if RIVALS.get(term) not in new}
        using = Using(
            terms={**kept, **new},
            key=key(given["key"], f"{name}: key=") if "key" in given else self.key,
            **{option: given.get(option, getattr(self, option)) for option in OTHERS},
        )
        _refuse_beside_debounce(definition, using)
        if using.app is not None and using.conn is not None:
            raise ConfigError(f"{name}: conn= decides the database: leave app= out")
        return using

    @property
    def lost_in_callback(self) -> str | None:
        """The name of an option that a callback cannot have, because its job is written before it is due."""
        terms = {
            "delay_ms": "delay", "due_at": "at", "expires_ms": "expires", "expires_at": "expires",
            "debounce_ms": "debounce", "key_window_ms": "unique_for",
        }  # fmt: skip
        given = [option for term, option in terms.items() if term in self.terms]
        given += [option for option in ("key", *OTHERS) if getattr(self, option) is not None]
        return given[0] if given else None


OTHERS = ("subject", "correlation_id", "conn", "batch", "app")


def _terms(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given options as terms of a job."""
    readers: Readers = {
        "delay": ("delay_ms", ms),
        "at": ("due_at", moment),
        "expires": ("expires_ms", ms) if not isinstance(given.get("expires"), datetime) else ("expires_at", moment),
        "priority": ("priority", whole),
        "queue": ("queue", named),
        "max_attempts": ("max_attempts", attempts),
        "keep": ("keep_ms", ms),
        "result_ttl": ("result_ttl_ms", ms),
        "debounce": ("debounce_ms", span),
        "unique_for": ("key_window_ms", span),
    }
    return read_terms(name, given, readers)


def _check_types(name: str, given: Mapping[str, Any]) -> None:
    batch = given.get("batch")
    if batch is not None and not hasattr(batch, "progress"):
        raise ConfigError(
            f"{name}: batch= is of type {type(batch).__name__}: give the batch of `with app.batch(…) as batch`, "
            "or app.batches.get(id)"
        )
    if "app" in given and not hasattr(app := given["app"], "tasks"):
        found = "app= is None" if app is None else f"app= is of type {type(app).__name__}"
        raise ConfigError(f"{name}: {found}: give what app.at(url) returns")
    for option in ("subject", "correlation_id"):
        if option in given and not isinstance(given[option], str):
            raise ConfigError(f"{name}: {option}= is of type {type(given[option]).__name__}: give a text")


def _refuse_beside_debounce(definition: Definition, using: Using) -> None:
    """Raise for options that cannot be combined with debounce, where several calls become one job."""
    if "debounce_ms" not in using.terms:
        return
    beside = {
        "delay= or at=, as the debounce is the delay": {"delay_ms", "due_at"} & using.terms.keys(),
        "unique_for=, which keeps later calls from counting": "key_window_ms" in using.terms,
        "batch=, as a debounced call may run as a later job": using.batch is not None,
        "ordering_key=, as the last call takes the place of the first": definition.ordering_key is not None,
    }
    for what, is_there in beside.items():
        if is_there:
            raise ConfigError(f"{definition.name}: debounce= does not go with {what}: leave one of them out")


def refuse_keyless(definition: Definition, using: Using) -> None:
    """Raise for options that need a key, without one."""
    if definition.key is not None or using.key is not None:
        return
    for term, option in (("debounce_ms", "debounce"), ("key_window_ms", "unique_for")):
        if term in using.terms:
            raise ConfigError(
                f"{definition.name}: {option}= needs to know which calls are the same: "
                f"give using({option}=…, key=…), or the task a key="
            )
