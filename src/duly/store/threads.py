"""Threads that wait for a database, and do not keep the process from exiting while they do."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class DaemonThreads:
    """A few daemon threads, started when needed. Python waits at exit for those of a `ThreadPoolExecutor`."""

    def __init__(self, size: int, name: str) -> None:
        self._size = size
        self._name = name
        self._threads: list[threading.Thread] = []
        self._idle = threading.Semaphore(0)
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run a function in a free thread. One caller at a time."""
        future: Future[T] = Future()
        self._work.put((future, work))
        if not self._idle.acquire(blocking=False) and len(self._threads) < self._size:
            name = f"{self._name}_{len(self._threads)}"
            self._threads.append(threading.Thread(target=self._run, name=name, daemon=True))
            self._threads[-1].start()
        return future

    def shutdown(self) -> None:
        """Wait until all work is done, and end the threads."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            future, work = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)
            del item, future, work  # nothing is kept alive by an idle thread
            self._idle.release()
