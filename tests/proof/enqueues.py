"""What an enqueue adds, read from its parameters."""

from __future__ import annotations

import json
from typing import Any

from duly.store.op import Op
from duly.store.ops import listed


def jobs_of(op: Op[Any]) -> list[dict[str, Any]]:
    """Read the jobs of an enqueue in their order: at least the id, the payload and the lane of each."""
    if "payloads" not in op.params and "payload" not in op.params:  # they have keys
        keyed: list[dict[str, Any]] = json.loads(op.params["jobs"])
        return keyed
    jobs = {
        id_: {"id": id_, "payload": payload, "lane": json.loads(kind)[0]}
        for kind, payloads in json.loads(f"{{{listed(op)}}}").items()
        for id_, payload in payloads.items()
    }
    return [jobs[id_] for id_ in json.loads(op.params["ids"])] if "ids" in op.params else list(jobs.values())
