"""Keeps workers running, as a supervisor and a probe do."""

from __future__ import annotations

import subprocess
import threading
import time
from typing import Any

from tests.proof.fleet import Fleet


class Keeper:
    """Starts workers again that died, and kills those that give no sign of life.

    Every death is written down, with the time since which the worker did not answer.
    """

    def __init__(self, fleet: Fleet, count: int, *, stale_s: float = 5.0, **options: Any) -> None:
        self.deaths: list[int] = []
        self.hung: list[int] = []
        self._fleet = fleet
        self._stale_s = stale_s
        self._options = options
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep)
        for _ in range(count):
            fleet.start(**options)

    def __enter__(self) -> Keeper:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _keep(self) -> None:
        while not self._over.wait(0.02):
            for worker in list(self._fleet.workers):
                silent = self._silent_for(worker)
                if worker.poll() is not None:
                    self.deaths.append(worker.pid)
                    self._replace(worker)
                elif silent > self._stale_s:
                    self.hung.append(worker.pid)
                    self._fleet.ledger.note(
                        "stopped", pid=worker.pid, at=time.monotonic() - silent, until=time.monotonic()
                    )
                    self._replace(worker)

    def _replace(self, worker: subprocess.Popen[bytes]) -> None:
        self._fleet.kill(worker)
        self._fleet.start(**self._options)

    def _silent_for(self, worker: subprocess.Popen[bytes]) -> float:
        """Say how long a worker has given no sign of life; nothing is known of one that has not begun."""
        signs = (self._fleet.folder / "run").glob(f"worker-{worker.pid}-*.json")
        return max((time.time() - sign.stat().st_mtime for sign in signs), default=0.0)
