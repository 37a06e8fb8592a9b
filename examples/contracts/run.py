"""Each promise as a story with real processes. The evidence is in rows and in the log of the workers."""

import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime
from itertools import chain
from signal import SIGCONT, SIGKILL, SIGSTOP
from typing import Any
from urllib.parse import urlsplit

from duly import Duly, errors, testing
from examples.transcript import Transcript, free_port, until

run = Transcript()
from examples.contracts.app import app, call, drive, letter, parcel, quote, serve, stamp, weigh  # noqa: E402

Lines = Iterator[tuple[str, object, object]]  # a claim, whether it holds, the evidence
WORKER = ("duly", "worker", "examples.contracts.app:app", "--log-json", "--queues")
ON_POSTGRESQL = run.url.startswith("postgres")
AN_HOUR_AHEAD = """import time; here = time.time; time.time = lambda: here() + 3600
from examples.contracts.app import parcel; print(parcel.using(delay="1s").enqueue("book").id)"""
NOT_PROMISED = """Not promised, and what gets closer:
  exact start times: a new job wakes a worker, which also polls each second; a limit of time: timeout=
  order: ordering_key=; fair shares of workers or customers: cap_key=; a worker for one customer: --queues
  effects outside the database exactly once: pass on ctx.key; inside it, ctx.commit is exact
  results and history for ever: result_ttl=, keep=; jobs that an asynchronous standby lacks: a synchronous one"""


def schedules() -> Lines:
    with testing.frozen(app, datetime(2026, 3, 28, 20, 30, tzinfo=UTC)) as clock:
        clock.set(datetime(2026, 3, 29, 1, tzinfo=UTC))
        testing.drain(app, queues=["clock"])
        at = [f"{datetime.fromtimestamp(fire.due_at / 1000, UTC):%H:%M}" for fire in app.schedules.fires("night")]
        yield (
            "a time that the clock skips fires once, after it",
            at == ["01:00"],
            f"02:30 in Vienna fired at {words(at)} UTC",
        )
        jobs = app.list(task="empty")
        ran = [[job.result for job in jobs if job.schedule == name] for name in ("skip", "last", "all")]
        each_ran = words(f"{name} {len(each)}" for name, each in zip(("skip", "last", "all"), ran, strict=True))
        told_of = f"5 missed, runs: {each_ran}; the last one is told of {words(ran[1])}"
        yield "missed times run as catchup= asks", ran == [[0], [5], [0] * 5], told_of
        wait = {each.name: ((each.next_at or 0) - clock.ms) // 60_000 for each in app.schedules.list()}
        late = f"30 min late; next in {wait['rate']} and {wait['delay']} min"
        yield "a rate does not drift, a delay counts from the end", (wait["rate"], wait["delay"]) == (30, 60), late
        clock.advance("50d")
        testing.drain(app, queues=["clock"])
        runs = len(app.schedules.fires("all", limit=5000)) - 5
        yield "all missed times run with catchup=all", runs == 1200, f"of 1200 in 50 days {runs} ran"
    for name in app.schedules.in_code:  # the workers begin them anew, in the present
        app.schedules.delete(name)


def retention() -> Lines:
    with testing.frozen(app, datetime(2026, 1, 1, tzinfo=UTC)) as clock:
        ids = []
        for days in (0, 14, 2):
            clock.advance(f"{days}d")
            ids.append(stamp.using(queue="clock").enqueue(0).id)
            testing.drain(app, queues=["clock"])
        same = ["yes" if later == ids[0] else "no" for later in ids[1:]]
        yield (
            "a key is kept for 15 days",
            same == ["yes", "no"],
            f"the same job after 14 days {same[0]}, after 16 {same[1]}",
        )
        price = quote.enqueue()
        testing.drain(app, queues=["clock"])
        found = [told(lambda: price.result(1))]
        clock.advance("2h")
        found.append(told(lambda: price.result(1)))
        yield (
            "a result ends with its result_ttl",
            found == ["2 euros", "ResultExpired"],
            f"at once {found[0]}, 2 h later {found[1]}",
        )


def states() -> Lines:
    jobs = [parcel.enqueue(what) for what in ("book", "unknown", "fragile")]
    jobs.append(parcel.enqueue("book", opens_at=time.time() + 0.5))
    jobs.append(parcel.using(queue="closed", expires="300ms").enqueue("book"))
    jobs.append(parcel.using(delay="1h").enqueue("book"))
    app.cancel(jobs[-1].id, by="ann")
    ends = ", ".join(f"{job.state} {job.attempt}" for job in map(ended, jobs))
    good = "succeeded 1, dead 1, succeeded 2, succeeded 1, cancelled 0, cancelled 0"
    yield "done, failed, retried, snoozed, expired, cancelled jobs end", ends == good, ends


def keys() -> Lines:
    with ThreadPoolExecutor(12) as callers:
        list(callers.map(stamp.enqueue, [1] * 12))
    paid = {ended(stamp.enqueue(1)).result for _ in range(3)}
    runs = sum(job.attempt for job in app.list(task="stamp", queue="default"))
    yield "a key runs once", runs == 1, f"12 racing callers, 3 later ones: {runs} run, result {words(paid)}"
    answer = told(lambda: stamp.enqueue(1, cents=200).id)
    yield "a key with other arguments is refused", answer == "KeyConflict", answer


def caps() -> Lines:
    jobs, seen = serve.enqueue_many(serve.call(customer) for customer in range(12)), [0]
    until(lambda: app.list(task="serve", state="running"))
    os.kill(pid_of(app.list(task="serve", state="running")[0]), SIGKILL)

    def is_over() -> bool:
        seen.append(len(app.list(task="serve", state="running")))
        return not seen[-1] and all(read(job).finished_at for job in jobs)

    good, tries = until(is_over) and max(seen) == 2, sum(read(job).attempt for job in jobs)
    yield "a cap holds, although a worker is killed", good, f"12 jobs, {tries} attempts, at most {max(seen)} at once"


def retries() -> Lines:
    jobs = [ended(job) for job in call.enqueue_many(call.call(number) for number in range(12))]
    ends = [rows(f"select at from duly_attempts where job_id = '{job.id}' order by at") for job in jobs]
    gaps = [[(each[n + 1][0] - each[n][0]) / 1000 for each in ends if len(each) == 4] for n in range(3)]
    good = all(len(gap) == 12 and min(gap) >= 0.33 * 2**n for n, gap in enumerate(gaps))
    shown = ", ".join(f"{min(gap):.2f}-{max(gap):.2f} s" for gap in gaps if gap)
    yield "attempts are bounded and back off", good, f"{len(gaps[0])} jobs of 12 ran 4 times, after {shown}"


def leases() -> Lines:
    jobs = [drive.enqueue(9), drive.enqueue(3)]
    until(lambda: all(read(job).worker for job in jobs))
    killed, stopped = (pid_of(read(job)) for job in jobs)
    stop(stopped)
    os.kill(killed, SIGKILL)
    began = time.monotonic()
    first, second = ended(jobs[0]).result, ended(jobs[1]).result
    took = f"{first} after {time.monotonic() - began:.1f} s, with a lease of 3 s"
    yield "the job of a killed worker runs again", first == "attempt 2", took
    os.kill(stopped, SIGCONT)
    late = until(lambda: logged(jobs[1], "job.lost") or logged(jobs[1], "job.lease_lost"))
    good = late and second == read(jobs[1]).result == "attempt 2"
    yield "a worker that wakes up late writes nothing", good, f"its end is refused, the result stays {second!r}"


def stop(pid: int) -> None:
    """Stop a process at a moment at which it holds no lock of the SQLite file: all others would wait for it."""
    os.kill(pid, SIGSTOP)
    try:
        _ = ON_POSTGRESQL or rows("begin immediate", patience=0.3)
    except sqlite3.OperationalError:
        os.kill(pid, SIGCONT)
        stop(pid)


def replays() -> Lines:
    dead = [ended(parcel.enqueue("unknown"))]
    for by in ("ann", "ben", "eve"):
        dead.append(ended(app.dead.replay(dead[-1].id, by=by, why="the address was found")))
    who = dict(rows("select cast(job_id as text), \"by\" from duly_events where name = 'job.replayed'"))
    audit = [who.get(job.id) for job in dead[:3]]
    good = (dead[3].origin, dead[3].replay_count, audit) == (dead[0].id, 3, ["ann", "ben", "eve"])
    yield "a replay keeps origin, count and audit", good, f"replayed {dead[3].replay_count} times, by {words(audit)}"
    again = app.dead.replay(dead[0].id, by="dan")
    yield "a second replay is the first", again == dead[1].id, f"asked twice, {again}"


def poison() -> Lines:
    letter.enqueue_many(letter.call(number) for number in range(130))
    good = ended(parcel.enqueue("book"))
    waited = f"behind 130 poison jobs one took {(good.finished_at or 0) - good.created_at} ms"
    yield "poison at the head blocks no other job", good.state == "succeeded", waited
    hooked = until(lambda: dead() == [130, 130])
    yield "each death calls its hook, which may fail", hooked, "{} dead letters, {} dead hooks".format(*dead())
    replayed = len(app.dead.replay_all(task="letter", by="zoe", why="a better reader"))
    counted = until(lambda: dead() == [130, 230])
    yield "a bulk replay is bounded", counted and replayed == 100, f"{replayed} of 130 replayed; {dead()[1]} dead hooks"


def dead() -> list[int]:
    counts = {figure.task: figure.count for figure in app.dead.metrics()}
    return [counts.get("letter", 0), counts.get("tell", 0)]


def progress() -> Lines:
    job = weigh.enqueue()
    until(lambda: read(job).progress is not None)
    shown, stalled = [read(job).progress], until(lambda: logged(job, "job.stalled"))
    left = (read(job).lease_until or 0) / 1000 - time.time()
    yield "a stalled handler is reported under its lease", stalled and left > 0, f"{left:.0f} s of the lease left"
    shown.append(ended(job).progress)
    yield "progress stays within 0 and 100", shown == [0, 100], f"-5 and 140 are shown as {words(shown)}"


def clocks() -> Lines:
    job = subprocess.run([sys.executable, "-c", AN_HOUR_AHEAD], stdout=subprocess.PIPE, text=True, check=True)
    ran = ended(job.stdout.strip())
    took = (ran.finished_at or 0) - ran.created_at
    yield (
        "the clock of the database counts",
        1000 <= took < 60_000,
        f"producer 1 h ahead: a delay of 1 s took {took} ms",
    )


def outage() -> Lines:
    url, port = urlsplit(run.url), free_port()
    way = ("examples.transcript", port, url.hostname or "127.0.0.1", str(url.port or 5432))
    far = url._replace(netloc="@".join([*url.netloc.split("@")[:-1], f"127.0.0.1:{port}"])).geturl()
    gate, worker, shop = run.start(*way), run.start(*WORKER, "far", DULY_URL=far), Duly(far)
    price = shop.task(name="quote", queue="far")(lambda: "the worker knows")
    until(lambda: told(lambda: price.enqueue().result(5)) == "2 euros")
    gate.kill()
    gate.wait()
    began = time.monotonic()
    answer = told(price.enqueue)
    took = time.monotonic() - began
    yield "without a database an enqueue is refused", (answer, took < 2) == ("StoreUnavailable", True), f"{took:.2f} s"
    time.sleep(2)
    run.start(*way)
    back = until(lambda: told(lambda: price.enqueue().result(5)) == "2 euros")
    shop.close()
    out = f"{time.monotonic() - began:.1f} s, no restart"
    yield "workers go on after an outage", back and worker.poll() is None, out


def words(values: Iterable[object]) -> str:
    return ", ".join(map(str, values)) or "nothing"


def told(ask: Callable[[], object]) -> str:
    """Return an answer, or the name of the error in place of it."""
    try:
        return str(ask())
    except (errors.DulyError, TimeoutError) as error:
        return type(error).__name__


def read(job: Any) -> Any:
    return app.get(getattr(job, "id", job))


def ended(job: Any) -> Any:
    """Return the row of a job when it has ended, or as it is after 15 s."""
    until(lambda: read(job).finished_at)
    return read(job)


def pid_of(job: Any) -> int:
    return int(job.worker.split("-")[-2])


def logged(job: Any, event: str) -> bool:
    return any(job.id in line and f'"{event}"' in line for line in run.log.read_text("utf-8").splitlines())


def rows(statement: str, patience: float = 5) -> list[Any]:
    if not ON_POSTGRESQL:
        with closing(sqlite3.connect(run.url.removeprefix("sqlite:///"), timeout=patience)) as file:
            return file.execute(statement).fetchall()
    import psycopg

    with psycopg.connect(run.url, options=f"-c search_path={os.environ['DULY_SCHEMA']}") as server:
        cursor = server.execute(statement)
        return cursor.fetchall() if cursor.description else []


def main() -> None:
    began = time.monotonic()
    if app.list(limit=1):
        sys.exit(f"{run.url} has jobs already: name a new file")
    for line in chain(schedules(), retention()):  # they move the clock
        run.claim(*line)
    stories = [states, keys, caps, retries, leases, replays, poison, progress, clocks] + [outage] * ON_POSTGRESQL
    with ThreadPoolExecutor(len(stories)) as threads, run:  # side by side, told in order
        for queue, concurrency, processes in (("default", "8", 2), ("counters", "4", 2), ("vans", "1", 3)):
            for _ in range(processes):
                run.start(*WORKER, queue, "--concurrency", concurrency)
        until(lambda: sum(each.alive for each in app.workers()) >= 7, 30)
        for line in chain.from_iterable(threads.map(lambda story: list(story()), stories)):
            run.claim(*line)
    print(f"{time.monotonic() - began:.0f} s. {NOT_PROMISED}")


if __name__ == "__main__":
    try:
        main()
    finally:
        app.close()
        if ON_POSTGRESQL:
            rows(f"drop schema if exists {os.environ['DULY_SCHEMA']} cascade")
