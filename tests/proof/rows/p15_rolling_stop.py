"""P15: one worker after the other is asked to stop and replaced, as a deployment does it."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Callable

from duly.store import ops
from duly.worker.stopping import Stopping
from tests.proof.breaks import BREAKS
from tests.proof.checker import judge
from tests.proof.fleet import Fleet, four_on_postgres
from tests.proof.load import Load, burnt, numbers, untold
from tests.proof.table import Figure, Row, Setting

LEASE = 1.0
GRACE = 1.0
# Some end within the grace time, some do not; threads and the event loop alike.
WORK = (
    (6, "sleepy", (0.3,)),
    (2, "quick", (1,)),
    (2, "busy", (0.3,)),
    (1, "sleepy", (3.0,)),
    (1, "attentive", (3.0, 3.0)),
)


def _left_to_the_lease() -> Callable[[], None]:
    """Have workers go without giving back what they hold."""
    stop_running, leave = Stopping.stop_running, Stopping._leave

    async def gone(self: Stopping) -> None:
        await self._shared.driver.arun(ops.leave(self._shared.id))

    Stopping.stop_running = lambda self: None  # type: ignore[method-assign]
    Stopping._leave = gone  # type: ignore[method-assign]

    def undo() -> None:
        Stopping.stop_running, Stopping._leave = stop_running, leave  # type: ignore[method-assign]

    return undo


BREAKS["p15:left_to_the_lease"] = _left_to_the_lease


def run(setting: Setting) -> Figure:
    """Stop and replace workers in turn under load."""
    with four_on_postgres(setting.folder, lease_s=LEASE, grace=f"{GRACE}s") as (_, workers):
        return _rolling(setting, workers)


def _rolling(setting: Setting, workers: Fleet) -> Figure:
    chance = random.Random(setting.seed)
    exits: list[float] = []
    codes: set[int] = set()
    with Load(workers, WORK, seed=setting.seed) as load:
        time.sleep(1.0)
        for _ in range(setting.pick(4, 24)):
            began = time.monotonic()
            time.sleep(chance.uniform(0.0, 0.3))
            exits.append(_replaced(workers, workers.workers[0], codes))
            time.sleep(max(0.0, began + setting.pick(2.0, 3.0) - time.monotonic()))
        drained = load.drained(5 if setting.broken else 15)
    workers.end()
    history = workers.history()
    found, again, open_ends = judge(history), burnt(workers.path), len(untold(history))
    released = sum(run.how == "released" for runs in history.runs.values() for run in runs)
    slowest = max(exits)
    right = (
        found.valid and found.duplicates == 0 and drained and not again and not open_ends
        and released > 0 and codes == {0}
    )  # fmt: skip
    text = (
        f"{len(exits)} stops, {found}, {again} attempts burnt, {released} runs given back; "
        f"gone {slowest:.2f} s after SIGTERM at most (grace {GRACE:.0f} s)"
        + (f"; exit codes {sorted(codes)}" if codes != {0} else "")
    )
    more = {"burnt": again, "untold": open_ends, "released": released, "exit_s": slowest}
    return Figure(text, right and slowest <= GRACE + 1, numbers(found, **more), only_slow=right)


def _replaced(workers: Fleet, worker: subprocess.Popen[bytes], codes: set[int]) -> float:
    """Start another worker, ask this one to stop once that is there, and say how long it takes to go."""
    workers.start(grace=f"{GRACE}s")
    workers.started(len(workers.asides("worker.started")) + 1)
    began = time.monotonic()
    worker.terminate()
    codes.add(worker.wait(GRACE + 10))
    workers.workers.remove(worker)
    return time.monotonic() - began


ROW = Row(
    "P15",
    "rolling stop: SIGTERM to one worker after the other",
    "0 duplicates, 0 attempts burnt, exit within grace + 1 s",
    run,
    controls=("p15:left_to_the_lease",),
    takes=1.0,
    control_takes=1.0,
)
