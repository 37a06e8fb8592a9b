"""`python -m bench.parts.worker`: the process that works. Its orders come on stdin, what it has to tell goes to stdout.

The first line is the order; "go" begins; any later line asks for CPU and memory now. When stdin ends, whoever gave the
orders is gone, and so is this process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import resource
import sys
import threading
import time
from collections.abc import Iterator

import msgspec

from bench.parts.load import CONCURRENCY, arguments, declare
from bench.parts.orders import Orders, Told
from bench.parts.tally import Tally
from duly.duly import Duly
from duly.store.driver import Point

LOOK_SECONDS = 0.002
CALM_SECONDS = 0.5


def main() -> None:
    """Take orders, wait for the word, work, and tell."""
    logging.getLogger("duly").addHandler(logging.NullHandler())  # failures by plan are no news
    lines = _lines()
    orders = msgspec.json.decode(next(lines), type=Orders)
    work = _Work(orders)
    _tell(Told())
    next(lines)
    threading.Thread(target=_answer, args=(lines,), daemon=True).start()
    begun = time.process_time()
    asyncio.run(work.run())
    _tell(work.told(time.process_time() - begun))
    work.app.close()


def _lines() -> Iterator[bytes]:
    """Read lines as they come, by the descriptor: a thread that waits in a file object would hold up the end."""
    heard = b""
    while True:
        while b"\n" in heard:
            line, _, heard = heard.partition(b"\n")
            yield line
        more = os.read(0, 1 << 16)
        if not more:
            os._exit(1)
        heard += more


def _answer(lines: Iterator[bytes]) -> None:
    for _ in lines:
        _tell(Told(cpu_s=time.process_time(), resident_mib=_most_resident_mib()))


def _tell(told: Told) -> None:
    os.write(1, msgspec.json.encode(told) + b"\n")


class _Work:
    """One app with one task, and what the orders say to do with it."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self.app = Duly(**orders.arguments)
        self._tally = Tally(orders.tally, orders.jobs)
        self._task = declare(self.app, orders.kind, self._tally.note, queue=orders.queue)
        self._sections: list[str] = []
        self._returned: list[float] = []
        if orders.counted:
            self._count()

    def _count(self) -> None:
        """Have statements counted, and let SQLite's log grow, so that its length tells what was written."""
        from duly.store.sqlite import checkpoint

        checkpoint.CHECKPOINT_BYTES = 1 << 60

        def hook(point: Point) -> None:
            if point.moment == "before":
                self._sections.append(point.section)

        self.app.driver.hook = hook

    async def run(self) -> None:
        """Work until it is enough."""
        worker = self.app.worker(
            queues=[self._orders.queue], concurrency=CONCURRENCY, drain=self._orders.work == "drain"
        )
        working = asyncio.create_task(worker.run())
        try:
            if self._orders.work == "pick up":
                await self._enqueue_one_by_one()
            if self._orders.work in ("pick up", "some"):
                await self._until_done(working)
                worker.stop()
        finally:
            await working

    async def _enqueue_one_by_one(self) -> None:
        """Enqueue in the loop that works, never in step with anything; the first one only warms up."""
        for number in range(self._orders.jobs):
            await self._task.aenqueue(*arguments(self._orders.kind, number))
            self._returned.append(time.time())
            await asyncio.sleep(CALM_SECONDS if number == 0 else pause_s())

    async def _until_done(self, working: asyncio.Task[None]) -> None:
        while not working.done() and not self._tally.complete(self._orders.enough or None):
            await asyncio.sleep(LOOK_SECONDS)

    def told(self, cpu_s: float) -> Told:
        """Sum up."""
        commits = self._sections.count("commit")
        return Told(
            first_at=self._tally.first_at,
            last_at=self._tally.last_at,
            cpu_s=cpu_s,
            resident_mib=_most_resident_mib(),
            statements=len(self._sections) - commits,
            commits=commits,
            returned=self._returned,
        )


def _most_resident_mib() -> float:
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / 1024 if sys.platform != "darwin" else most / 1024 / 1024


def pause_s() -> float:
    """Give a pause between two single jobs."""
    return random.uniform(0.01, 0.03)


if __name__ == "__main__":
    main()
