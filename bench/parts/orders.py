"""What the bench tells its workers, and what they tell it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from bench.parts.load import Kind


class Orders(msgspec.Struct):
    """What one worker is to do.

    `drain`: until nothing is due. `serve`: until it is told to stop. `some`: until the first `enough` jobs have run.
    `pick up`: enqueue the jobs one by one in the same process, and run them.
    """

    arguments: dict[str, Any]
    tally: str
    jobs: int
    kind: Kind
    work: Literal["drain", "serve", "some", "pick up"] = "drain"
    queue: str = "default"
    enough: int = 0
    counted: bool = False


class Told(msgspec.Struct):
    """What a worker has to tell: times by this machine's clock, and what it used since it was told to go."""

    first_at: float = 0.0
    last_at: float = 0.0
    cpu_s: float = 0.0
    resident_mib: float = 0.0
    statements: int = 0
    commits: int = 0
    returned: list[float] = msgspec.field(default_factory=list)
