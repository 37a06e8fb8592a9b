"""The definition of a task: its function, compiled, and its options."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from duly.rules import keys, signature
from duly.rules.lifecycle import Policy
from duly.rules.rate import Rate

OrderingDead: TypeAlias = Literal["block", "skip"]


class Kind(StrEnum):
    """Where a handler runs."""

    ASYNC = "async"
    THREAD = "thread"
    PROCESS = "process"


class Definition(Struct, frozen=True):
    """A task's function, compiled, and the options of its jobs. An option that is None has the app's setting."""

    name: str
    handler: Callable[..., Any]
    context: Callable[[Any], Any] | None  # makes the handler's first argument from its lease
    codec: signature.SignatureCodec
    result_type: Any
    kind: Kind
    is_async: bool
    policy: Policy
    retries: Callable[[BaseException], bool]
    aliases: tuple[str, ...] = ()
    queue: str = "default"
    priority: int = 0
    max_attempts: int | None = None
    timeout_ms: int | None = None
    lease_ms: int | None = None
    stall_after_ms: int | None = None
    key: keys.Key | None = None
    keep_ms: int | None = None
    result_ttl_ms: int | None = None
    schema_version: int = 1
    on_dead: Any = None  # a task or the name of one
    cap: int | None = None
    cap_key: keys.Key | None = None
    rate: Rate | None = None
    ordering_key: keys.Key | None = None
    ordering_dead: OrderingDead = "block"

    @property
    def lane_key(self) -> keys.Key | None:
        """The key that selects the lane of a job. None: all jobs share one lane, or have no lane."""
        return self.cap_key if self.ordering_key is None else self.ordering_key

    @property
    def is_laned(self) -> bool:
        """Whether a limit or an order may hold back jobs that are due."""
        return self.cap is not None or self.rate is not None or self.ordering_key is not None
