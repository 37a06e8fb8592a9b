"""Wrong uses of tasks: mypy reports each line that ends in a mark, and no other.

The mark `E: arg-type` names the error code. A question mark after it says that the line must be reported, but that
the code is mypy's choice of today: what it says of overloads changes from version to version.
"""

from typing import Any

from duly import Ctx, Duly, SyncCtx

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


async def arguments() -> None:
    plain("one")  # E: arg-type
    plain.enqueue("one")  # E: arg-type
    plain.enqueue()  # E: call-arg
    plain.enqueue(1, "a", 2)  # E: call-arg
    plain.enqueue(1, wort="a")  # E: call-arg
    await plain.aenqueue(1, 2)  # E: arg-type
    plain.enqueue_many([plain.call("one")])  # E: arg-type
    plain.using(delay="5m").enqueue("one")  # E: arg-type

    await coroutine("one")  # E: arg-type
    coroutine.enqueue("one")  # E: arg-type
    coroutine.enqueue()  # E: call-arg
    coroutine.enqueue(1, "a", 2)  # E: call-arg
    coroutine.enqueue(1, wort="a")  # E: call-arg
    await coroutine.aenqueue(1, 2)  # E: arg-type
    coroutine.enqueue_many([coroutine.call("one")])  # E: arg-type
    coroutine.using(delay="5m").enqueue("one")  # E: arg-type

    await with_ctx("one")  # E: arg-type
    with_ctx.enqueue("one")  # E: arg-type
    with_ctx.enqueue()  # E: call-arg
    with_ctx.enqueue(1, "a", 2)  # E: call-arg
    with_ctx.enqueue(1, wort="a")  # E: call-arg
    await with_ctx.aenqueue(1, 2)  # E: arg-type
    with_ctx.enqueue_many([with_ctx.call("one")])  # E: arg-type
    with_ctx.using(delay="5m").enqueue("one")  # E: arg-type

    with_sync_ctx("one")  # E: arg-type
    with_sync_ctx.enqueue("one")  # E: arg-type
    with_sync_ctx.enqueue()  # E: call-arg
    with_sync_ctx.enqueue(1, "a", 2)  # E: call-arg
    with_sync_ctx.enqueue(1, wort="a")  # E: call-arg
    await with_sync_ctx.aenqueue(1, 2)  # E: arg-type
    with_sync_ctx.enqueue_many([with_sync_ctx.call("one")])  # E: arg-type
    with_sync_ctx.using(delay="5m").enqueue("one")  # E: arg-type

    plain_on_mail("one")  # E: arg-type
    plain_on_mail.enqueue("one")  # E: arg-type
    plain_on_mail.enqueue()  # E: call-arg
    plain_on_mail.enqueue(1, "a", 2)  # E: call-arg
    plain_on_mail.enqueue(1, wort="a")  # E: call-arg
    await plain_on_mail.aenqueue(1, 2)  # E: arg-type
    plain_on_mail.enqueue_many([plain_on_mail.call("one")])  # E: arg-type
    plain_on_mail.using(delay="5m").enqueue("one")  # E: arg-type

    await coroutine_on_mail("one")  # E: arg-type
    coroutine_on_mail.enqueue("one")  # E: arg-type
    coroutine_on_mail.enqueue()  # E: call-arg
    coroutine_on_mail.enqueue(1, "a", 2)  # E: call-arg
    coroutine_on_mail.enqueue(1, wort="a")  # E: call-arg
    await coroutine_on_mail.aenqueue(1, 2)  # E: arg-type
    coroutine_on_mail.enqueue_many([coroutine_on_mail.call("one")])  # E: arg-type
    coroutine_on_mail.using(delay="5m").enqueue("one")  # E: arg-type

    await with_ctx_on_mail("one")  # E: arg-type
    with_ctx_on_mail.enqueue("one")  # E: arg-type
    with_ctx_on_mail.enqueue()  # E: call-arg
    with_ctx_on_mail.enqueue(1, "a", 2)  # E: call-arg
    with_ctx_on_mail.enqueue(1, wort="a")  # E: call-arg
    await with_ctx_on_mail.aenqueue(1, 2)  # E: arg-type
    with_ctx_on_mail.enqueue_many([with_ctx_on_mail.call("one")])  # E: arg-type
    with_ctx_on_mail.using(delay="5m").enqueue("one")  # E: arg-type

    with_sync_ctx_on_mail("one")  # E: arg-type
    with_sync_ctx_on_mail.enqueue("one")  # E: arg-type
    with_sync_ctx_on_mail.enqueue()  # E: call-arg
    with_sync_ctx_on_mail.enqueue(1, "a", 2)  # E: call-arg
    with_sync_ctx_on_mail.enqueue(1, wort="a")  # E: call-arg
    await with_sync_ctx_on_mail.aenqueue(1, 2)  # E: arg-type
    with_sync_ctx_on_mail.enqueue_many([with_sync_ctx_on_mail.call("one")])  # E: arg-type
    with_sync_ctx_on_mail.using(delay="5m").enqueue("one")  # E: arg-type


def needs_text(text: str) -> None: ...


async def results() -> None:
    needs_text(plain.enqueue(1).result())  # E: arg-type
    needs_text(await (await plain.aenqueue(1)).aresult())  # E: arg-type
    needs_text(plain(1))  # E: arg-type
    needs_text(coroutine.enqueue(1).result())  # E: arg-type
    needs_text(await (await coroutine.aenqueue(1)).aresult())  # E: arg-type
    needs_text(await coroutine(1))  # E: arg-type
    needs_text(with_ctx.enqueue(1).result())  # E: arg-type
    needs_text(await (await with_ctx.aenqueue(1)).aresult())  # E: arg-type
    needs_text(await with_ctx(1))  # E: arg-type
    needs_text(with_sync_ctx.enqueue(1).result())  # E: arg-type
    needs_text(await (await with_sync_ctx.aenqueue(1)).aresult())  # E: arg-type
    needs_text(with_sync_ctx(1))  # E: arg-type
    needs_text(plain_on_mail.enqueue(1).result())  # E: arg-type
    needs_text(await (await plain_on_mail.aenqueue(1)).aresult())  # E: arg-type
    needs_text(plain_on_mail(1))  # E: arg-type
    needs_text(coroutine_on_mail.enqueue(1).result())  # E: arg-type
    needs_text(await (await coroutine_on_mail.aenqueue(1)).aresult())  # E: arg-type
    needs_text(await coroutine_on_mail(1))  # E: arg-type
    needs_text(with_ctx_on_mail.enqueue(1).result())  # E: arg-type
    needs_text(await (await with_ctx_on_mail.aenqueue(1)).aresult())  # E: arg-type
    needs_text(await with_ctx_on_mail(1))  # E: arg-type
    needs_text(with_sync_ctx_on_mail.enqueue(1).result())  # E: arg-type
    needs_text(await (await with_sync_ctx_on_mail.aenqueue(1)).aresult())  # E: arg-type
    needs_text(with_sync_ctx_on_mail(1))  # E: arg-type
    words.enqueue_many([plain.call(1)])  # E: list-item


@app.task
def words(text: str) -> list[str]:
    return text.split()


async def the_context_is_injected(ctx: Ctx, sync_ctx: SyncCtx) -> None:
    with_ctx.enqueue(ctx, 1)  # E: arg-type
    with_sync_ctx.enqueue(sync_ctx, 1)  # E: arg-type
    with_ctx.enqueue(1, ctx=ctx)  # E: call-arg
    with_sync_ctx_on_mail.enqueue(1, ctx=sync_ctx)  # E: call-arg


def options() -> None:
    plain.using(dely="5m")  # E: call-arg
    with_ctx_on_mail.using(prioritty=3)  # E: call-arg
    with_sync_ctx.using(priority="high")  # E: arg-type
    coroutine.using("5m")  # E: call-arg


@app.task(que="mail")  # E: call-overload?
def misspelt(number: int) -> int:
    return number


@app.task(max_attemps=5)  # E: call-overload?
async def misspelt_with_ctx(ctx: Ctx, number: int) -> int:
    return number


@app.task(max_attempts="five")  # E: call-overload?
def mistyped(number: int) -> int:
    return number


@app.task(isolation="fork")  # E: call-overload?
def with_unknown_isolation(number: int) -> int:
    return number


# The context of the other world.


@app.task  # E: arg-type?
def ctx_in_a_plain_function(ctx: Ctx, number: int) -> int:
    return number


@app.task(queue="mail")  # E: arg-type?
def ctx_in_a_plain_function_on_mail(ctx: Ctx, number: int) -> int:
    return number


@app.task  # E: arg-type?
def ctx_alone_in_a_plain_function(ctx: Ctx) -> None: ...


@app.task  # E: arg-type?
def ctx_and_payload_in_a_plain_function(ctx: Ctx, body: dict[str, Any]) -> Any:
    return body


@app.task  # E: arg-type?
async def sync_ctx_in_a_coroutine(ctx: SyncCtx, number: int) -> int:
    return number


@app.task(queue="mail")  # E: arg-type?
async def sync_ctx_in_a_coroutine_on_mail(ctx: SyncCtx, number: int) -> int:
    return number


@app.task  # E: arg-type?
async def sync_ctx_alone_in_a_coroutine(ctx: SyncCtx) -> None: ...


@app.task  # E: arg-type?
async def sync_ctx_and_payload_in_a_coroutine(ctx: SyncCtx, body: dict[str, Any]) -> Any:
    return body


# A first parameter that would take a context, because it takes anything, is no context.


@app.task
def takes_object(thing: object, word: str = "") -> float:
    return len(word)


@app.task(queue="mail")
async def slowly_takes_object(thing: object, word: str = "") -> float:
    return len(word)


@app.task(queue="mail")
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
    takes_object.enqueue()  # E: call-arg
    takes_object.enqueue(5, 6)  # E: arg-type
    slowly_takes_object.enqueue()  # E: call-arg
    slowly_takes_object.enqueue(5, 6)  # E: arg-type
    takes_any.enqueue()  # E: call-arg
    takes_any.enqueue(5, 6)  # E: arg-type
    slowly_takes_any.enqueue()  # E: call-arg
    slowly_takes_any.enqueue(5, 6)  # E: arg-type
    slowly_takes_any.enqueue(5, "a", 6)  # E: call-arg
    takes_any_alone.enqueue()  # E: call-arg
    any_to_any.enqueue()  # E: call-arg


# An `Any` inside of a handler's type switches no check off.


@app.task
def payload(number: int, body: dict[str, Any]) -> dict[str, Any]:
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


def any_inside() -> None:
    payload.enqueue(1)  # E: call-arg
    payload.enqueue("one", {})  # E: arg-type
    payload_with_ctx.enqueue()  # E: call-arg
    payload_with_ctx.enqueue("body")  # E: arg-type
    payload_with_sync_ctx.enqueue()  # E: call-arg
    payload_with_sync_ctx.enqueue("body")  # E: arg-type
    text: str = payload_with_ctx.enqueue({}).result()  # E: assignment
    unknown.enqueue(text)  # E: arg-type


@app.every("10m")
def often() -> int:
    return 1


def schedules() -> None:
    app.every("10m", overlop="skip")  # E: call-arg
    app.every([10])  # E: arg-type
    often.enqueue(1)  # E: call-arg
    app.schedules.create("one", print, "1h")  # E: arg-type
    app.schedules.create("one", often, "1h", pause_after="3")  # E: arg-type


def batches() -> None:
    app.batch()  # E: call-arg
    app.batch("import", on_complet=often)  # E: call-arg
    app.batch("import", on_complete=print)  # E: arg-type
    app.batch("import", ok_at="all")  # E: arg-type
    app.batches.list(nmae="import")  # E: call-arg
    with app.batch("import") as batch:
        batch.fill([often])  # E: list-item
        batch.wait("5s")  # E: arg-type
    often.using(batch=batch.id)  # E: arg-type
    text: str = batch.progress().total  # E: assignment
    print(text)
