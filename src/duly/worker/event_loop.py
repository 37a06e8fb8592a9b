"""Signal handlers and a task factory, which a worker adds to its event loop and removes again."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from duly.app.lease import current

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# A loop has one handler for each signal and may have several workers: the handler stops them all.
_stops: WeakKeyDictionary[asyncio.AbstractEventLoop, list[Callable[[], None]]] = WeakKeyDictionary()


@contextmanager
def stopped_by_signals(stop: Callable[[], None], *, wanted: bool) -> Iterator[None]:
    """Stop on SIGTERM and Ctrl-C, if this is the main thread."""
    if not wanted or threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    stops = _stops.setdefault(loop, [])
    if not stops:
        for number in SIGNALS:
            loop.add_signal_handler(number, _stop_all, stops)
    stops.append(stop)
    try:
        yield
    finally:
        stops.remove(stop)
        if not stops:
            for number in SIGNALS:
                loop.remove_signal_handler(number)


def _stop_all(stops: list[Callable[[], None]]) -> None:
    for stop in tuple(stops):
        stop()


@contextmanager
def tasks_of_handlers_noted() -> Iterator[None]:
    """Remember the tasks that a handler starts, to log those it leaves running."""
    loop = asyncio.get_running_loop()
    before = loop.get_task_factory()

    def make(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> Any:
        task = before(loop, coroutine, **options) if before else asyncio.Task(coroutine, loop=loop, **options)
        lease = current.get()
        if lease is not None and not lease.over:
            lease.left.add(task)  # type: ignore[arg-type]
            task.add_done_callback(lease.left.discard)
        return task

    loop.set_task_factory(make)
    try:
        yield
    finally:
        loop.set_task_factory(before)
