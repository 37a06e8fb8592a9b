"""The tasks of a post office: one for each promise that `run.py` puts to the test."""

import time

from duly import Duly, Retry, Snooze, SyncCtx, backoff

app = Duly()  # the database is $DULY_URL


@app.task(give_up_on=LookupError)
def parcel(ctx: SyncCtx, what: str, opens_at: float = 0.0) -> None:
    if what == "unknown":
        raise LookupError("no such address")
    if what == "fragile" and ctx.attempt == 1:
        raise Retry("the lift is out of order", after="100ms")
    if time.time() < opens_at:
        raise Snooze("200ms")


@app.task(key=lambda order, **_: f"stamp:{order}")
def stamp(order: int, cents: int = 100) -> str:
    return f"{cents} cents"


@app.task(max_attempts=4, backoff=backoff.exponential(first="400ms", factor=2, jitter=0.15))
def call(number: int) -> None:
    raise ConnectionError("engaged")


@app.task(queue="counters", cap=2, lease="2s")
def serve(customer: int) -> None:
    time.sleep(0.5)


@app.task(queue="vans", lease="3s")
def drive(ctx: SyncCtx, seconds: float) -> str:
    time.sleep(seconds if ctx.attempt == 1 else 0)
    return f"attempt {ctx.attempt}"


@app.task(max_attempts=1)
def tell(job_id: str) -> None:
    raise ConnectionError("the sender does not answer")


@app.task(max_attempts=1, on_dead=tell)
def letter(number: int) -> None:
    raise ValueError("the address is not readable")


@app.task(stall_after="300ms")
def weigh(ctx: SyncCtx) -> None:
    ctx.progress(-5)
    time.sleep(1)
    ctx.progress(140)


@app.task(queue="clock", result_ttl="1h")
def quote() -> str:
    return "2 euros"


@app.every("0 * * * *", name="skip", catchup="skip")
@app.every("0 * * * *", name="last", catchup="last")
@app.every("0 * * * *", name="all", catchup="all")
@app.every("30 2 * * *", name="night", tz="Europe/Vienna")
@app.every("1h", name="rate", mode="rate")
@app.every("1h", name="delay", mode="delay")
@app.task(queue="clock")
def empty(ctx: SyncCtx) -> int:
    return ctx.missed.count
