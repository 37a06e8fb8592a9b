"""How long to wait after a failed attempt: pure values, the same delay for the same attempt and chance.

`chance` in [0, 1) is the randomness. Jitter only shortens a delay: so it is never above the cap, and jobs that have
reached the cap are spread out too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from duly.errors import ConfigError
from duly.rules.durations import Duration, to_ms
from duly.rules.messages import brief

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Exponential:
    """Each delay is `factor` times the one before."""

    first_ms: int
    factor: float
    cap_ms: int
    jitter: float

    def delay_ms(self, attempt: int, chance: float) -> int:
        """Return the delay after the failed attempt number `attempt`."""
        try:
            grown = self.first_ms * self.factor ** (max(attempt, 1) - 1)
        except OverflowError:
            grown = math.inf
        return round(min(grown, self.cap_ms) * (1 - self.jitter * chance))


@dataclass(frozen=True, slots=True)
class Linear:
    """Each delay is `step_ms` longer than the one before; a step of 0 makes it fixed."""

    first_ms: int
    step_ms: int
    cap_ms: int

    def delay_ms(self, attempt: int, chance: float) -> int:
        """Return the delay after the failed attempt number `attempt`."""
        return min(self.first_ms + self.step_ms * (max(attempt, 1) - 1), self.cap_ms)


@dataclass(frozen=True, slots=True)
class Delays:
    """The delays are listed; the last one is used again when attempts outlast the list."""

    delays_ms: tuple[int, ...]

    def delay_ms(self, attempt: int, chance: float) -> int:
        """Return the delay after the failed attempt number `attempt`."""
        return self.delays_ms[min(max(attempt, 1), len(self.delays_ms)) - 1]


Backoff: TypeAlias = Exponential | Linear | Delays


def exponential(first: Duration = 5, factor: float = 2, cap: Duration = "1h", jitter: float = 0.2) -> Exponential:
    """Wait `first`, then `factor` times as long each time, up to `cap`, less up to `jitter` of it."""
    first_ms, cap_ms = _first_and_cap(first, cap)
    if first_ms == 0:
        raise ConfigError("backoff first is 0, which never grows: give a first delay, or backoff.fixed(0)")
    growth = _number(factor, "factor")
    if growth < 1:
        raise ConfigError(f"backoff factor is {factor}: give 1 or more, so that delays do not shrink")
    share = _number(jitter, "jitter")
    if not 0 <= share <= 1:
        raise ConfigError(f"backoff jitter is {jitter}: give a share between 0 and 1")
    return Exponential(first_ms, growth, cap_ms, share)


def fixed(delay: Duration) -> Linear:
    """Wait the same time after every attempt."""
    delay_ms = to_ms(delay, what="backoff delay")
    return Linear(delay_ms, 0, delay_ms)


def linear(first: Duration, step: Duration | None = None, cap: Duration = "1h") -> Linear:
    """Wait `first`, then `step` longer each time (`first` again unless given), up to `cap`."""
    first_ms, cap_ms = _first_and_cap(first, cap)
    step_ms = first_ms if step is None else to_ms(step, what="backoff step")
    return Linear(first_ms, step_ms, cap_ms)


def delays(listed: Sequence[Duration]) -> Delays:
    """Wait the listed delays in turn."""
    if not listed:
        raise ConfigError("backoff is an empty list: give at least one delay, or max_attempts=1 for no retry")
    return Delays(tuple(to_ms(delay, what=f"backoff delay {n}") for n, delay in enumerate(listed, 1)))


def of(value: Backoff | Sequence[Duration]) -> Backoff:
    """Take a backoff, or a plain list of delays in its place."""
    if isinstance(value, Exponential | Linear | Delays):
        return value
    if isinstance(value, list | tuple):
        return delays(value)
    raise ConfigError(
        f"backoff is of type {type(value).__name__}: give backoff.exponential(), backoff.linear(), "
        "backoff.fixed() or a list of delays"
    )


def attempts_for(backoff: Backoff) -> int | None:
    """Return how many attempts a list of delays allows, None for other backoffs."""
    return len(backoff.delays_ms) + 1 if isinstance(backoff, Delays) else None


def unused_delays(backoff: Backoff, max_attempts: int) -> tuple[int, ...]:
    """Return the listed delays that `max_attempts` never reaches, in milliseconds."""
    # The last attempt is not followed by a delay: five attempts have four delays between them.
    return backoff.delays_ms[max(max_attempts - 1, 0) :] if isinstance(backoff, Delays) else ()


def _first_and_cap(first: Duration, cap: Duration) -> tuple[int, int]:
    """Read the first delay and the cap; raise if the cap is below the first delay."""
    first_ms, cap_ms = to_ms(first, what="backoff first"), to_ms(cap, what="backoff cap")
    if first_ms > cap_ms:
        raise ConfigError(f"backoff first {brief(first)} is above its cap {brief(cap)}: raise cap=, or lower first=")
    return first_ms, cap_ms


def _number(value: object, what: str) -> float:
    """Raise unless `value` is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"backoff {what} is {brief(value)}: give a number")
    return float(value)
