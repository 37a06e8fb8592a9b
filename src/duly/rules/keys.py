"""Ids and keys: UUIDv7 made by the client, fingerprints of payloads, idempotency keys.

Ids sort by the time they were made, strictly within one process, so that jobs are claimed in the order of enqueue.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeAlias

import msgspec

from duly.errors import ConfigError

Key: TypeAlias = str | int | Callable[..., str | int]

LONGEST_KEY = 512

_RANDOM_BITS = 74  # 12 before the variant and 62 after it
_LOW_DIGITS = 12  # behind the last dash
_LOW = (1 << 4 * _LOW_DIGITS) - 1
_REPLAY = re.compile(r"#replay[0-9]+\Z")
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


def new_id(now_ms: int, random_bytes: bytes) -> str:
    """Make the UUIDv7 of this time from 10 random bytes."""
    return _uuid7(now_ms, int.from_bytes(random_bytes, "big") & ((1 << _RANDOM_BITS) - 1))


def _uuid7(ms: int, tail: int) -> str:
    """Lay out 48 bits of time, the version, 12 bits, the variant and 62 bits."""
    high, low = tail >> 62, tail & 0x3FFF_FFFF_FFFF_FFFF
    digits = f"{(ms & 0xFFFF_FFFF_FFFF) << 80 | high << 64 | low | 0x7000_8000_0000_0000_0000:032x}"
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


class Ids:
    """Makes ids that only increase, even within a millisecond and when the clock steps back."""

    def __init__(
        self,
        clock: Callable[[], int] = time.time_ns,
        randomness: Callable[[int], bytes] | None = None,
    ) -> None:
        """Take a clock in nanoseconds and a source of random bytes, the system's if none is given."""
        self._clock = clock
        self._randomness = randomness or self._draw
        self._seed()
        if hasattr(os, "register_at_fork"):
            # A weak reference: the hook cannot be removed, and must not keep this object alive.
            ours = weakref.WeakMethod(self._seed)
            os.register_at_fork(after_in_child=lambda: (again := ours()) and again())

    def _seed(self) -> None:
        """Start again: a forked child would repeat its parent's ids, and inherit a lock that no thread releases."""
        self._lock = threading.Lock()
        self._ms = -1
        self._tail = 0
        self._drawn = io.BytesIO()

    def __call__(self) -> str:
        """Make the next id."""
        return _uuid7(*self._take(1))

    def many(self, count: int) -> list[str]:
        """Make the next ids, in their order."""
        ms, first = self._take(count)
        low = first & _LOW
        if low + count > _LOW:  # the prefix changes within these ids
            return [_uuid7(ms, tail) for tail in range(first, first + count)]
        begins = _uuid7(ms, first)[:-_LOW_DIGITS]
        return [f"{begins}{digits:012x}" for digits in range(low, low + count)]

    def _take(self, count: int) -> tuple[int, int]:
        """Return the millisecond and the first tail of the next ids."""
        with self._lock:
            now_ms = self._clock() // 1_000_000
            if now_ms > self._ms:
                self._begin(now_ms)
            else:
                self._tail += 1
            if (self._tail + count - 1) >> _RANDOM_BITS:
                self._begin(self._ms + 1)
            first = self._tail
            self._tail += count - 1
            return self._ms, first

    def _begin(self, ms: int) -> None:
        self._ms = ms
        self._tail = self._fresh()

    def _fresh(self) -> int:
        """Draw a random tail with its top bit clear, which leaves room to count up."""
        return int.from_bytes(self._randomness(10), "big") & ((1 << (_RANDOM_BITS - 1)) - 1)

    def _draw(self, count: int) -> bytes:
        """Read many random bytes at once: each read releases the GIL, in the middle of an enqueue."""
        drawn = self._drawn.read(count)
        if len(drawn) < count:
            self._drawn = io.BytesIO(os.urandom(100 * count))
            drawn = self._drawn.read(count)
        return drawn


def id_in(batch_id: str, place: int) -> str:
    """Make the id of the job at a place of a batch that is filled in order: the same at every call."""
    digits = batch_id.replace("-", "")
    own = int.from_bytes(hashlib.blake2b(digits.encode(), digest_size=6).digest(), "big") & ((1 << 42) - 1)
    return _uuid7(int(digits[:12], 16), (place << 42 | own) & ((1 << _RANDOM_BITS) - 1))


def new_token() -> int:
    """Make the token of a claim: 53 random bits, which every store keeps exactly, and never 0."""
    return (int.from_bytes(os.urandom(7), "big") >> 3) or 1


def fingerprint(payload: str) -> str:
    """Hash JSON text so that the order of keys does not matter."""
    canonical = msgspec.json.encode(msgspec.json.decode(payload), order="sorted")
    return hashlib.blake2b(canonical, digest_size=16).hexdigest()


def key_of(key: Key, arguments: Mapping[str, Any], what: str = "key=") -> str:
    """Return the key of a job whose handler gets `arguments` (names to values, defaults filled in)."""
    made = _call(key, arguments, what) if callable(key) else key
    where = f"{what} gave" if callable(key) else f"{what} is"
    if isinstance(made, bool) or not isinstance(made, str | int):
        raise ConfigError(f"{where} a value of type {type(made).__name__}: a key is a str or an int")
    # Not str(made): for an enum of strings that would be its name.
    return check_key(str.__str__(made) if isinstance(made, str) else int.__repr__(made), where)


def check_key(text: str, where: str = "key= is") -> str:
    """Raise if some store cannot keep the key."""
    if not text:
        raise ConfigError(f"{where} an empty string: give at least one character, or None for no key")
    if len(text) > LONGEST_KEY:
        raise ConfigError(f"{where} {len(text)} characters: at most {LONGEST_KEY} are allowed, so hash it")
    if _UNSTORABLE.search(text):
        raise ConfigError(f"{where} a text with a NUL or a lone surrogate, which no database stores: remove it")
    return text


def _call(key: Callable[..., Any], arguments: Mapping[str, Any], what: str) -> Any:
    """Call a key function with the arguments it names, or with all in order when its names are its own."""
    names, takes_any = _parameters(key)
    by_name = names.keys() if not takes_any else names.keys() | arguments.keys()
    if all(name in arguments for name, required in names.items() if required):
        return key(**{name: arguments[name] for name in by_name if name in arguments})
    if len(names) == len(arguments) and not takes_any:
        return key(*arguments.values())
    raise ConfigError(
        f"{what} is a function of ({', '.join(names)}), but the handler's arguments are "
        f"({', '.join(arguments)}): name those the key is made of"
    )


@lru_cache(maxsize=1024)
def _parameters(key: Callable[..., Any]) -> tuple[dict[str, bool], bool]:
    """Return the parameters of a key function, each with whether it is required, and whether it takes any."""
    try:
        parameters = inspect.signature(key).parameters.values()
    except ValueError as error:
        raise ConfigError(
            f"key= is a function whose parameters are not known: wrap it in a lambda ({error})"
        ) from error
    stars = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    named = [p for p in parameters if p.kind not in stars]
    # The slash hides a parameter that cannot be given by name.
    slashed = {p.name + "/" * (p.kind is p.POSITIONAL_ONLY): p.default is p.empty for p in named}
    return slashed, any(p.kind is p.VAR_KEYWORD for p in parameters)


def replay_key(key: str, n: int) -> str:
    """Mark a key as that of replay number `n`, in place of an earlier mark."""
    return f"{_REPLAY.sub('', key)}#replay{n}"
