"""Right uses of tasks: mypy has nothing to say about this file, and infers each type that `assert_type` names."""

from collections.abc import Awaitable, Callable, Coroutine
from datetime import timedelta
from typing import Any, assert_type

from duly import Ctx, Duly, SyncCtx
from duly.app.app import Job

app = Duly()


@app.task
def plain(number: int, word: str = "") -> float:
    return number / len(word)


@app.task
async def coroutine(number: int, word: str = "") -> float:
    return number / len(word)


@app.task
async def with_ctx(ctx: Ctx, number: int, word: str = "") -> float:
    return number / len(word)


@app.task
def with_sync_ctx(ctx: SyncCtx, number: int, word: str = "") -> float:
    return number / len(word)


@app.task(queue="mail", max_attempts=5)
def plain_on_mail(number: int, word: str = "") -> float:
    return number / len(word)


@app.task(queue="mail", max_attempts=5)
async def coroutine_on_mail(number: int, word: str = "") -> float:
    return number / len(word)


@app.task(queue="mail", max_attempts=5)
async def with_ctx_on_mail(ctx: Ctx, number: int, word: str = "") -> float:
    return number / len(word)


@app.task(queue="mail", max_attempts=5)
def with_sync_ctx_on_mail(ctx: SyncCtx, number: int, word: str = "") -> float:
    return number / len(word)


async def calls() -> None:
    """The context is nobody's argument, and results keep their type."""
    assert_type(plain(1), float)
    assert_type(plain.enqueue(1).result(), float)
    assert_type(plain.enqueue(number=1, word="a").id, str)
    assert_type(await (await plain.aenqueue(1, word="a")).aresult(timeout=5), float)
    assert_type(plain.enqueue_many([plain.call(1, "a")])[0].result(), float)
    assert_type(plain.using(delay="5m", key="k").using(priority=3).enqueue(1).result(), float)
    assert_type(await coroutine(1), float)
    assert_type(coroutine.enqueue(1).result(), float)
    assert_type(coroutine.enqueue(number=1, word="a").id, str)
    assert_type(await (await coroutine.aenqueue(1, word="a")).aresult(timeout=5), float)
    assert_type(coroutine.enqueue_many([coroutine.call(1, "a")])[0].result(), float)
    assert_type(coroutine.using(delay="5m", key="k").using(priority=3).enqueue(1).result(), float)
    assert_type(await with_ctx(1), float)
    assert_type(with_ctx.enqueue(1).result(), float)
    assert_type(with_ctx.enqueue(number=1, word="a").id, str)
    assert_type(await (await with_ctx.aenqueue(1, word="a")).aresult(timeout=5), float)
    assert_type(with_ctx.enqueue_many([with_ctx.call(1, "a")])[0].result(), float)
    assert_type(with_ctx.using(delay="5m", key="k").using(priority=3).enqueue(1).result(), float)
    assert_type(with_sync_ctx(1), float)
    assert_type(with_sync_ctx.enqueue(1).result(), float)
    assert_type(with_sync_ctx.enqueue(number=1, word="a").id, str)
    assert_type(await (await with_sync_ctx.aenqueue(1, word="a")).aresult(timeout=5), float)
    assert_type(with_sync_ctx.enqueue_many([with_sync_ctx.call(1, "a")])[0].result(), float)
    assert_type(with_sync_ctx.using(delay="5m", key="k").using(priority=3).enqueue(1).result(), float)
    assert_type(plain_on_mail(1), float)
    assert_type(plain_on_mail.enqueue(1).result(), float)
    assert_type(plain_on_mail.enqueue(number=1, word="a").id, str)
    assert_type(await (await plain_on_mail.aenqueue(1, word="a")).aresult(timeout=5), float)
    assert_type(plain_on_mail.enqueue_many([plain_on_mail.call(1, "a")])[0].result(), float)
    assert_type(plain_on_mail.using(delay="5m", key="k").using(priority=3).enqueue(1).result(), float)
    assert_type(await coroutine_on_mail(1), float)
    assert_type(coroutine_on_mail.enqueue(1).result(), float)
    assert_type(coroutine_on_mail.enqueue(number=1, word="a").id, str)
    assert_type(await (await coroutine_on_mail.aenqueue(1, word="a")).aresult(timeout=5), float)
    assert_type(coroutine_on_mail.enqueue_many([coroutine_on_mail.call(1, "a")])[0].result(), float)
    assert_type(coroutine_on_mail.using(delay="5m", key="k").using(priority=3).enqueue(1).result(), float)
    assert_type(await with_ctx_on_mail(1), float)
    assert_type(with_ctx_on_mail.enqueue(1).result(), float)
    assert_type(with_ctx_on_mail.enqueue(number=1, word="a").id, str)
    assert_type(await (await with_ctx_on_mail.aenqueue(1, word="a")).aresult(timeout=5), float)
    assert_type(with_ctx_on_mail.enqueue_many([with_ctx_on_mail.call(1, "a")])[0].result(), float)
    assert_type(with_ctx_on_mail.using(delay="5m", key="k").using(priority=3).enqueue(1).result(), float)
    assert_type(with_sync_ctx_on_mail(1), float)
    assert_type(with_sync_ctx_on_mail.enqueue(1).result(), float)
    assert_type(with_sync_ctx_on_mail.enqueue(number=1, word="a").id, str)
    assert_type(await (await with_sync_ctx_on_mail.aenqueue(1, word="a")).aresult(timeout=5), float)
    assert_type(with_sync_ctx_on_mail.enqueue_many([with_sync_ctx_on_mail.call(1, "a")])[0].result(), float)
    assert_type(with_sync_ctx_on_mail.using(delay="5m", key="k").using(priority=3).enqueue(1).result(), float)


async def a_task_is_a_callable() -> None:
    half: Callable[[int], float] = plain
    slow_half: Callable[[int, str], Awaitable[float]] = with_ctx
    print(half(1), await slow_half(1, "a"), sorted([1, 2], key=plain))
    await assert_type(with_ctx(1), Coroutine[Any, Any, float])


def options() -> None:
    plain.using(delay=5, queue="mail", max_attempts=3, keep=timedelta(days=1), result_ttl="1h").enqueue(1)
    plain.using(expires="1d", subject="order 5", correlation_id="c").enqueue(1)
    plain.using(debounce="30s", key="k").using(key="k", unique_for=timedelta(hours=1)).enqueue(1)


@app.task()
def with_empty_options() -> None: ...


@app.task(
    name="report",
    aliases=["old_report"],
    priority=1,
    timeout=30.0,
    lease="1m",
    stall_after=timedelta(minutes=2),
    key=lambda day: f"report:{day}",
    keep="30d",
    isolation="process",
    schema_version=2,
)
def with_many_options(day: str) -> list[str]:
    return [day]


@app.task
async def with_ctx_alone(ctx: Ctx) -> None: ...


@app.task
def keyword_only(*, number: int) -> int:
    return number


@app.task
async def with_ctx_and_keywords(ctx: Ctx, /, *numbers: int, word: str, **more: float) -> str:
    return word


@app.task
async def with_ctx_and_any_keywords(ctx: Ctx, **more: Any) -> int:
    return len(more)


@app.task
def with_sync_ctx_and_any_keywords(ctx: SyncCtx, **more: Any) -> int:
    return len(more)


def other_shapes() -> None:
    assert_type(with_empty_options.enqueue().result(), None)
    assert_type(with_many_options.enqueue("today").result(), list[str])
    assert_type(with_ctx_alone.enqueue().result(), None)
    assert_type(keyword_only.enqueue(number=1).result(), int)
    assert_type(with_ctx_and_keywords.enqueue(1, 2, word="a", tax=0.5).result(), str)
    assert_type(with_ctx_and_any_keywords.enqueue(tax=0.5, word="a").result(), int)
    assert_type(with_sync_ctx_and_any_keywords.enqueue(tax=0.5, word="a").result(), int)


# A first parameter that would take a context, because it takes anything, is no context.


@app.task
def takes_object(thing: object, word: str = "") -> float:
    return len(word)


@app.task
async def slowly_takes_object(thing: object, word: str = "") -> float:
    return len(word)


@app.task
def takes_any(thing: Any, word: str = "") -> float:
    return len(word)


@app.task(queue="mail")
async def slowly_takes_any(thing: Any, word: str = "") -> float:
    return len(word)


@app.task
def takes_any_alone(thing: Any) -> int:
    return 1


@app.task
def any_to_any(thing: Any) -> Any:
    return thing


def anything_is_an_argument() -> None:
    assert_type(takes_object.enqueue(5).result(), float)
    assert_type(slowly_takes_object.enqueue(5, "a").result(), float)
    assert_type(takes_any.enqueue(5).result(), float)
    assert_type(slowly_takes_any.enqueue(thing=5, word="a").result(), float)
    assert_type(takes_any_alone.enqueue(5).result(), int)
    assert_type(any_to_any.enqueue(5).result(), Any)


# mypy stops checking a call of an overloaded function where an `Any` inside of an argument leaves it a choice:
# a payload or a result of `dict[str, Any]` must leave none.


@app.task
def payload(number: int, body: dict[str, Any]) -> dict[str, Any]:
    return body


@app.task
async def slow_payload(number: int, body: dict[str, Any]) -> dict[str, Any]:
    return body


@app.task(queue="mail")
async def payload_with_ctx(ctx: Ctx, body: dict[str, Any]) -> dict[str, Any]:
    return body


@app.task
def payload_with_sync_ctx(ctx: SyncCtx, body: dict[str, Any]) -> dict[str, Any]:
    return body


@app.task
def unknown(number: int) -> Any:
    return number


@app.task
def unknown_with_sync_ctx(ctx: SyncCtx, number: int) -> Any:
    return number


async def any_inside() -> None:
    assert_type(payload.enqueue(1, {}).result(), dict[str, Any])
    assert_type(await slow_payload(1, {}), dict[str, Any])
    assert_type(slow_payload.enqueue(1, {}).result(), dict[str, Any])
    assert_type(payload_with_ctx.enqueue({}).result(), dict[str, Any])
    assert_type(payload_with_sync_ctx.enqueue({}).result(), dict[str, Any])
    assert_type(unknown.enqueue(1).result(), Any)
    assert_type(unknown_with_sync_ctx.enqueue(1).result(), Any)


@app.every("10m", overlap="skip")
def often() -> int:
    return 1


@app.every("0 9 * * mon-fri", tz="Europe/Vienna")
async def report(ctx: Ctx) -> str:
    return ctx.due_at.isoformat()


@app.every(timedelta(hours=1), mode="delay")
def slowly(ctx: SyncCtx) -> None: ...


@app.every(rrule="FREQ=DAILY")
@app.task(queue="mail")
def daily(number: int = 3) -> float:
    return number / 2


async def schedules() -> None:
    assert_type(often.enqueue().result(), int)
    assert_type(report.enqueue().result(), str)
    assert_type(slowly.enqueue().result(), None)
    assert_type(daily.enqueue(4).result(), float)
    app.schedules.create("one", daily.call(7), "1h", catchup="all")
    await app.schedules.acreate("two", often, "1h", jitter="1m")


async def batches() -> None:
    with app.batch("import", key="k", on_complete=often, on_success="report", ok_at=0.9) as batch:
        assert_type(plain.enqueue(1).result(), float)
        assert_type(batch.fill(plain.call(n) for n in range(9)), int)
        batch.fill([plain.call(1), keyword_only.call(number=2)])
    async with app.batch("import") as other:
        assert_type(await other.afill([coroutine.call(1)]), int)
        assert_type(await plain.using(batch=other).aenqueue(1), Job[float])
    assert_type(plain.using(batch=app.batches.get(batch.id)).enqueue(1).result(), float)
    assert_type(batch.progress().percent, float)
    assert_type((await other.await_(5)).complete, bool)
    assert_type(batch.cancel(by="me", why="so"), int)
    assert_type([one.total for one in app.batches.list(name="import", active=True)], list[int])
