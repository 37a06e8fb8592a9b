"""Uses of tasks: mypy accepts each unmarked line, infers each type that `assert_type` names, and refuses marked lines.

A mark `wrong: arg-type` names the error that mypy reports. `wrong: arg-type?` marks a line that must be reported with
any code: what mypy reports of overloads differs from version to version.

The test checks this file twice, with `@app.task` and with options in its place, and repeats functions for other tasks.
"""

from collections.abc import Awaitable, Callable, Coroutine
from datetime import timedelta
from typing import Any, assert_type

from duly import Ctx, Duly, SyncCtx
from duly.app.job import Job

app = Duly()


def needs_text(text: str) -> None: ...


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


# Again for: coroutine, with_ctx, with_sync_ctx
async def uses_of_plain() -> None:
    assert_type(plain.enqueue(1).result(), float)
    assert_type(plain.enqueue(number=1, word="a").id, str)
    assert_type(await (await plain.aenqueue(1, word="a")).aresult(timeout=5), float)
    assert_type(plain.enqueue_many([plain.call(1, "a")])[0].result(), float)
    assert_type(plain.using(delay="5m", key="k").using(priority=3).enqueue(1).result(), float)
    assert_type(plain.using(app=app.at("eu.db")).enqueue(1).result(), float)
    plain.using(app="eu.db")  # wrong: arg-type
    plain.enqueue("one")  # wrong: arg-type
    plain.enqueue()  # wrong: call-arg
    plain.enqueue(1, "a", 2)  # wrong: call-arg
    plain.enqueue(1, wort="a")  # wrong: call-arg
    await plain.aenqueue(1, 2)  # wrong: arg-type
    plain.enqueue_many([plain.call("one")])  # wrong: arg-type
    plain.using(delay="5m").enqueue("one")  # wrong: arg-type
    needs_text(plain.enqueue(1).result())  # wrong: arg-type
    needs_text(await (await plain.aenqueue(1)).aresult())  # wrong: arg-type


# Again for: with_sync_ctx
def calls_of_plain() -> None:
    assert_type(plain(1), float)
    plain("one")  # wrong: arg-type
    needs_text(plain(1))  # wrong: arg-type


# Again for: with_ctx
async def calls_of_coroutine() -> None:
    assert_type(await coroutine(1), float)
    await coroutine("one")  # wrong: arg-type
    needs_text(await coroutine(1))  # wrong: arg-type


async def a_task_is_a_callable() -> None:
    half: Callable[[int], float] = plain
    slow_half: Callable[[int, str], Awaitable[float]] = with_ctx
    print(half(1), await slow_half(1, "a"), sorted([1, 2], key=plain))
    await assert_type(with_ctx(1), Coroutine[Any, Any, float])


async def the_context_is_injected(ctx: Ctx, sync_ctx: SyncCtx) -> None:
    with_ctx.enqueue(ctx, 1)  # wrong: arg-type
    with_sync_ctx.enqueue(sync_ctx, 1)  # wrong: arg-type
    with_ctx.enqueue(1, ctx=ctx)  # wrong: call-arg
    with_sync_ctx.enqueue(1, ctx=sync_ctx)  # wrong: call-arg


def options() -> None:
    plain.using(delay=5, queue="mail", max_attempts=3, keep=timedelta(days=1), result_ttl="1h").enqueue(1)
    plain.using(expires="1d", subject="order 5", correlation_id="c").enqueue(1)
    plain.using(debounce="30s", key="k").using(key="k", unique_for=timedelta(hours=1)).enqueue(1)
    plain.using(dely="5m")  # wrong: call-arg
    with_ctx.using(prioritty=3)  # wrong: call-arg
    with_sync_ctx.using(priority="high")  # wrong: arg-type
    coroutine.using("5m")  # wrong: call-arg


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


def _plain(number: int) -> float:
    return number / 2


async def _with_ctx(ctx: Ctx, number: int) -> float:
    return number / 2


async def options_beside_a_function() -> None:
    assert_type(app.task(_plain, name="plain_too", max_attempts=1).enqueue(1).result(), float)
    assert_type(await app.task(_with_ctx, queue="mail", timeout="1m")(1), float)
    app.task(_plain, max_attempts=1).enqueue("one")  # wrong: arg-type
    app.task(_plain, max_attempts="one")  # wrong: call-overload?
    app.task(_with_ctx, que="mail")  # wrong: call-overload?


@app.task(que="mail")  # wrong: call-overload?
def misspelt(number: int) -> None: ...


@app.task(max_attemps=5)  # wrong: call-overload?
async def misspelt_with_ctx(ctx: Ctx, number: int) -> None: ...


@app.task(max_attempts="five")  # wrong: call-overload?
def mistyped(number: int) -> None: ...


@app.task(isolation="fork")  # wrong: call-overload?
def with_unknown_isolation(number: int) -> None: ...


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


@app.task
def words(text: str) -> list[str]:
    return text.split()


def other_shapes() -> None:
    assert_type(with_empty_options.enqueue().result(), None)
    assert_type(with_many_options.enqueue("today").result(), list[str])
    assert_type(with_ctx_alone.enqueue().result(), None)
    assert_type(keyword_only.enqueue(number=1).result(), int)
    assert_type(with_ctx_and_keywords.enqueue(1, 2, word="a", tax=0.5).result(), str)
    assert_type(with_ctx_and_any_keywords.enqueue(tax=0.5, word="a").result(), int)
    assert_type(with_sync_ctx_and_any_keywords.enqueue(tax=0.5, word="a").result(), int)
    words.enqueue_many([plain.call(1)])  # wrong: list-item


# A plain function takes a `SyncCtx`, a coroutine a `Ctx`.


@app.task  # wrong: arg-type?
def ctx_in_a_plain_function(ctx: Ctx, number: int) -> int:
    return number


@app.task  # wrong: arg-type?
def ctx_alone_in_a_plain_function(ctx: Ctx) -> None: ...


@app.task  # wrong: arg-type?
def ctx_and_payload_in_a_plain_function(ctx: Ctx, body: dict[str, Any]) -> Any:
    return body


@app.task  # wrong: arg-type?
async def sync_ctx_in_a_coroutine(ctx: SyncCtx, number: int) -> int:
    return number


@app.task  # wrong: arg-type?
async def sync_ctx_alone_in_a_coroutine(ctx: SyncCtx) -> None: ...


@app.task  # wrong: arg-type?
async def sync_ctx_and_payload_in_a_coroutine(ctx: SyncCtx, body: dict[str, Any]) -> Any:
    return body


# A first parameter that would accept a context, because it accepts anything, is no context.


@app.task
def takes_object(thing: object, word: str = "") -> float:
    return len(word)


@app.task
async def slowly_takes_object(thing: object, word: str = "") -> float:
    return len(word)


@app.task
def takes_any(thing: Any, word: str = "") -> float:
    return len(word)


@app.task
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
    takes_object.enqueue()  # wrong: call-arg
    takes_object.enqueue(5, 6)  # wrong: arg-type
    slowly_takes_object.enqueue()  # wrong: call-arg
    slowly_takes_object.enqueue(5, 6)  # wrong: arg-type
    takes_any.enqueue()  # wrong: call-arg
    takes_any.enqueue(5, 6)  # wrong: arg-type
    slowly_takes_any.enqueue()  # wrong: call-arg
    slowly_takes_any.enqueue(5, 6)  # wrong: arg-type
    slowly_takes_any.enqueue(5, "a", 6)  # wrong: call-arg
    takes_any_alone.enqueue()  # wrong: call-arg
    any_to_any.enqueue()  # wrong: call-arg


# mypy stops checking a call of an overloaded function where an `Any` inside an argument leaves it a choice:
# a payload or a result of `dict[str, Any]` must leave none.


@app.task
def payload(number: int, body: dict[str, Any]) -> dict[str, Any]:
    return body


@app.task
async def slow_payload(number: int, body: dict[str, Any]) -> dict[str, Any]:
    return body


@app.task
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
    payload.enqueue(1)  # wrong: call-arg
    payload.enqueue("one", {})  # wrong: arg-type
    payload_with_ctx.enqueue()  # wrong: call-arg
    payload_with_ctx.enqueue("body")  # wrong: arg-type
    payload_with_sync_ctx.enqueue()  # wrong: call-arg
    payload_with_sync_ctx.enqueue("body")  # wrong: arg-type
    text: str = payload_with_ctx.enqueue({}).result()  # wrong: assignment
    unknown.enqueue(text)  # wrong: arg-type


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
    app.every("10m", overlop="skip")  # wrong: call-arg
    app.every([10])  # wrong: arg-type
    often.enqueue(1)  # wrong: call-arg
    app.schedules.create("one", print, "1h")  # wrong: arg-type
    app.schedules.create("one", often, "1h", pause_after="3")  # wrong: arg-type


async def batches() -> None:
    with app.batch("import", key="k", on_complete=often, on_success="report", ok_at=0.9) as batch:
        assert_type(plain.enqueue(1).result(), float)
        assert_type(batch.fill(plain.call(n) for n in range(9)), int)
        batch.fill([plain.call(1), keyword_only.call(number=2)])
        batch.fill([often])  # wrong: list-item
        batch.wait("5s")  # wrong: arg-type
    async with app.batch("import") as other:
        assert_type(await other.afill([coroutine.call(1)]), int)
        assert_type(await plain.using(batch=other).aenqueue(1), Job[float])
    assert_type(plain.using(batch=app.batches.get(batch.id)).enqueue(1).result(), float)
    assert_type(batch.progress().percent, float)
    assert_type((await other.await_(5)).complete, bool)
    assert_type(batch.cancel(by="me", why="so"), int)
    assert_type([one.total for one in app.batches.list(name="import", active=True)], list[int])
    app.batch()  # wrong: call-arg
    app.batch("import", on_complet=often)  # wrong: call-arg
    app.batch("import", on_complete=print)  # wrong: arg-type
    app.batch("import", ok_at="all")  # wrong: arg-type
    app.batches.list(nmae="import")  # wrong: call-arg
    often.using(batch=batch.id)  # wrong: arg-type
    text: str = batch.progress().total  # wrong: assignment
    print(text)
