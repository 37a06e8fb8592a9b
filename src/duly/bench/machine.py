"""What a bench runs on: the processor, the system, the disk, and how busy all of it is."""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

BUSY = "the machine was busy: ratios drift towards 1 then, and flatter duly. Repeat this on a quiet one."


def machine(folder: Path) -> dict[str, Any]:
    """Say what is measured on and with; a sync is timed in `folder`."""
    return {
        "duly": version("duly"),
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "fdatasync_ms": round(sync_ms(folder), 3),
        "load_at_start": load(),
        "begun": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def cpu() -> str:
    """Name the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def sync_ms(folder: Path) -> float:
    """Time what every commit waits for: 4 KiB written to the disk."""
    sync = getattr(os, "fdatasync", os.fsync)
    with tempfile.TemporaryFile(dir=folder) as file:
        taken = []
        for _ in range(50):
            begun = time.perf_counter()
            os.write(file.fileno(), b"x" * 4096)
            sync(file.fileno())
            taken.append((time.perf_counter() - begun) * 1e3)
    return statistics.median(taken)


def load() -> float:
    """Say how many processes have wanted to run in the last minute."""
    return round(os.getloadavg()[0], 2)


def is_busy(about: dict[str, Any]) -> bool:
    """Say whether others wanted the machine when the bench began."""
    return bool(about["load_at_start"] > (about["cores"] or 1) / 2)
