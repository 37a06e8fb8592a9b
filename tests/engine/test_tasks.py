"""Tasks: what a definition takes and refuses, and what becomes of a job by what its handler does."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from datetime import datetime
from typing import Any, get_overloads

import pytest

from duly import Cancel, Ctx, Duly, Retry, Snooze, SyncCtx
from duly.app.decorator import TaskDecorator, TaskOptions
from duly.app.define import OPTIONS
from duly.errors import ConfigError
from duly.model import State
from duly.rules import backoff
from duly.store import migrate, ops
from tests.engine.conftest import Outside, found, work, work_until

# Definition: no database is needed


@pytest.fixture
def plain() -> Duly:
    return Duly("never-opened.db")


def refusal(define: Callable[[], Any]) -> str:
    with pytest.raises(ConfigError) as raised:
        define()
    return str(raised.value)


def test_j16_a_sync_handler_that_takes_the_async_context_is_refused_at_definition(plain: Duly) -> None:
    def handler(ctx: Ctx) -> None: ...

    assert refusal(lambda: plain.task(handler)) == "handler is sync: annotate `ctx` as SyncCtx, not Ctx"  # type: ignore[type-var]


def test_j16_an_async_handler_that_takes_the_sync_context_is_refused_at_definition(plain: Duly) -> None:
    async def handler(ctx: SyncCtx) -> None: ...

    assert refusal(lambda: plain.task(handler)) == "handler is async: annotate `ctx` as Ctx, not SyncCtx"


def test_a_context_without_an_annotation_raises_at_definition(plain: Duly) -> None:
    def handler(ctx, order): ...  # type: ignore[no-untyped-def]

    async def other(context, order): ...  # type: ignore[no-untyped-def]

    def fine(order, ctx): ...  # type: ignore[no-untyped-def]

    assert refusal(lambda: plain.task(handler)) == (
        "handler: annotate `ctx` as SyncCtx to be given the context, or name it otherwise"
    )
    assert "annotate `context` as Ctx" in refusal(lambda: plain.task(other))
    assert plain.task(fine).name == "fine"


def test_a_method_is_refused_at_definition(plain: Duly) -> None:
    class Mailer:
        def send(self, to: str) -> None: ...

    assert refusal(lambda: plain.task(Mailer.send)) == (
        "send has the parameter `self`: a task is a function of a module, not a method"
    )


def test_the_context_is_the_first_parameter(plain: Duly) -> None:
    def handler(number: int, ctx: SyncCtx) -> None: ...

    assert "handler: the context is the first parameter" in refusal(lambda: plain.task(handler))


def test_a_task_is_called_as_the_function_it_was(plain: Duly) -> None:
    @plain.task
    def add(a: int, b: int = 2) -> int:
        """Add."""
        return a + b

    assert (add(1), add(1, b=5), add.__name__, add.__doc__, add.name) == (3, 6, "add", "Add.", "add")


def test_a_handler_with_a_context_can_be_called_too_and_writes_nothing(plain: Duly) -> None:
    @plain.task
    def handler(ctx: SyncCtx, number: int) -> int:
        ctx.progress(50)
        ctx.heartbeat()
        return number

    assert handler(4) == 4


def test_context_calls_of_a_directly_called_handler_raise_with_the_reason(plain: Duly) -> None:
    @plain.task
    def handler(ctx: SyncCtx) -> str:
        return ctx.job_id

    assert "was called directly" in refusal(handler)


def test_a_name_that_is_taken_is_refused_and_the_other_is_named(plain: Duly) -> None:
    def one() -> None: ...

    def two() -> None: ...

    plain.task(name="mail")(one)
    said = refusal(lambda: plain.task(name="mail")(two))
    assert "a task named 'mail' is there already" in said
    assert "one): give one of them another name=" in said
    assert plain.tasks["mail"].definition.handler is one


def test_an_alias_in_use_is_refused_and_nothing_is_defined(plain: Duly) -> None:
    def one() -> None: ...

    def two() -> None: ...

    plain.task(name="mail", aliases=["post"])(one)
    assert "'post' is there already" in refusal(lambda: plain.task(aliases=["post"])(two))
    assert sorted(plain.tasks) == ["mail", "post"]


def test_a_lambda_needs_a_name(plain: Duly) -> None:
    assert "needs a name: define it with def, or give name=" in refusal(lambda: plain.task(lambda: None))
    assert plain.task(name="nothing")(lambda: None).name == "nothing"


def test_a_partial_needs_a_name(plain: Duly) -> None:
    assert "needs a name" in refusal(lambda: plain.task(functools.partial(print, "x")))


def test_a_handler_that_does_no_work_when_called_is_refused(plain: Duly) -> None:
    def counts() -> Any:
        yield 1

    async def acounts() -> Any:
        yield 1

    class Thing: ...

    @plain.task
    def once() -> None: ...

    assert "counts yields" in refusal(lambda: plain.task(counts))
    assert "acounts yields" in refusal(lambda: plain.task(acounts))
    assert "Thing is a class" in refusal(lambda: plain.task(Thing))
    assert "once is a task already" in refusal(lambda: plain.task(once))


def test_positional_options_raise_with_their_names(plain: Duly) -> None:
    assert "takes a function, not a str" in refusal(lambda: plain.task("mail"))  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"priority": True}, "f: priority= is True: give a whole number"),
        ({"priority": "high"}, "f: priority= is 'high': give a whole number"),
        ({"priority": 2**31}, "f: priority= is 2147483648: give a whole number from -2147483648"),
        ({"queue": ""}, "f: queue= is '': a name is a text, not empty"),
        ({"queue": 3}, "f: queue= is 3: a name is a text"),
        ({"queue": "a\x00b"}, "f: queue= is 'a\\x00b': a name is a text"),
        ({"name": 7}, "a task's name= is 7"),
        ({"name": ""}, "a task's name= is ''"),
        ({"aliases": "old"}, "f: aliases= is 'old': give a list of names"),
        ({"aliases": [""]}, "f: one of aliases= is ''"),
        ({"max_attempts": 0}, "f: max_attempts= is 0: give a whole number from 1"),
        ({"max_attempts": True}, "f: max_attempts= is True"),
        ({"max_attempts": "3"}, "f: max_attempts= is '3'"),
        ({"max_attempts": 0, "backoff": [1]}, "f: max_attempts= is 0"),
        ({"schema_version": 0}, "f: schema_version= is 0: give a whole number from 1"),
        ({"schema_version": True}, "f: schema_version= is True"),
        ({"schema_version": "2"}, "f: schema_version= is '2'"),
        ({"timeout": 0}, "f: timeout= is zero"),
        ({"lease": 0}, "f: lease= is zero"),
        ({"stall_after": "0s"}, "f: stall_after= is zero"),
        ({"lease": "soon"}, "f: lease="),
        ({"keep": -1}, "f: keep= is negative"),
        ({"result_ttl": object()}, "f: result_ttl= is of type object"),
        ({"key": ""}, "f: key= is an empty string"),
        ({"key": 1.5}, "f: key= is of type float: give a text or a function"),
        ({"isolation": "container"}, "f: isolation= is 'container'"),
        ({"retry_on": "ValueError"}, "f: retry_on= takes an exception"),
        ({"retry_on": int}, "f: retry_on= takes an exception"),
        ({"give_up_on": [ValueError, 3]}, "f: give_up_on= takes an exception"),
        ({"backoff": []}, "backoff is an empty list"),
        ({"backoff": 5}, "backoff is of type int"),
        ({"on_dead": 3}, "f: on_dead= is of type int: give a task, or the name of one"),
        ({"on_dead": print}, "f: on_dead= is of type builtin_function_or_method"),
    ],
)
def test_an_option_that_cannot_work_is_refused_at_definition(plain: Duly, options: dict[str, Any], said: str) -> None:
    def f() -> None: ...

    assert said in refusal(lambda: plain.task(**options)(f))
    assert plain.tasks == {}


def test_an_annotation_that_json_cannot_serve_is_refused_at_definition(plain: Duly) -> None:
    def f(what: list[int] | set[int]) -> None: ...

    assert "f: parameter `what` is annotated list[int] | set[int], which cannot" in refusal(lambda: plain.task(f))


def test_an_annotation_that_is_not_known_here_is_refused_at_definition(plain: Duly) -> None:
    def f(when: Nowhere) -> None: ...  # type: ignore[name-defined] # noqa: F821

    assert "f: the annotation of `when` is unknown here" in refusal(lambda: plain.task(f))


def test_on_dead_must_name_a_task_that_takes_the_job_id(plain: Duly) -> None:
    @plain.task(on_dead="nobody")
    def f() -> None: ...

    @plain.task
    def count(number: int) -> None: ...

    @plain.task(on_dead=count)
    def g() -> None: ...

    assert "f: on_dead='nobody' names no task" in refusal(f.enqueue)
    assert "g: on_dead= is called with job_id, which does not fit" in refusal(g.enqueue)


def test_r01_a_list_of_delays_gives_one_attempt_more_than_it_has_delays(plain: Duly) -> None:
    @plain.task(backoff=[1, 5, 30])
    def listed() -> None: ...

    @plain.task(backoff=[1, 5, 30], max_attempts=7)
    def both() -> None: ...

    @plain.task(backoff=backoff.fixed(3))
    def fixed() -> None: ...

    assert (listed.definition.max_attempts, both.definition.max_attempts) == (4, 7)
    assert fixed.definition.max_attempts is None


def test_r01_a_delay_that_is_never_used_warns_at_definition_and_where_it_is_written(plain: Duly) -> None:
    def f() -> None: ...

    with pytest.warns(UserWarning, match=r"f: with max_attempts=2 the delays \[5000, 30000\] are never used") as told:
        plain.task(backoff=[1, 5, 30], max_attempts=2)(f)
    assert told[0].filename == __file__

    def g() -> None: ...

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain.task(backoff=[1, 5, 30], max_attempts=4)(g)


def test_using_does_not_change_the_task(plain: Duly) -> None:
    @plain.task(priority=1)
    def f() -> None: ...

    other = f.using(priority=5, queue="mail").using(subject="s")
    assert (f._terms().priority, f._terms().queue, f._using.subject) == (1, "default", None)
    assert (other._terms().priority, other._terms().queue, other._using.subject) == (5, "mail", "s")
    assert plain.tasks == {"f": f}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"delay": 1, "at": datetime.now().astimezone()}, "f: give delay= or at=, not both"),
        ({"at": datetime(2030, 1, 1)}, "f: at= is 2030-01-01 00:00:00, which has no time zone"),
        ({"at": "tomorrow"}, "f: at= is of type str: give an aware datetime"),
        ({"expires": datetime(2030, 1, 1)}, "f: expires= is 2030-01-01 00:00:00, which has no time zone"),
        ({"delay": -1}, "f: delay= is negative"),
        ({"priority": True}, "f: priority= is True"),
        ({"queue": ""}, "f: queue= is ''"),
        ({"max_attempts": 0}, "f: max_attempts= is 0"),
        ({"key": ""}, "f: key= is an empty string"),
        ({"key": True}, "f: key= is of type bool"),
        ({"subject": 3}, "f: subject= is of type int: give a text"),
        ({"correlation_id": 3}, "f: correlation_id= is of type int: give a text"),
    ],
)
def test_terms_that_cannot_work_are_refused_by_using(plain: Duly, options: dict[str, Any], said: str) -> None:
    @plain.task
    def f() -> None: ...

    assert said in refusal(lambda: f.using(**options))


# How an attempt ends


@pytest.mark.parametrize("form", ["raised", "returned"])
def test_j15_a_snooze_gives_the_attempt_back(app: Duly, form: str) -> None:
    seen: list[int] = []

    @app.task(max_attempts=1)
    def poll(ctx: SyncCtx) -> Any:
        seen.append(ctx.attempt)
        if len(seen) > 2:
            return "done"
        return leave(Snooze("50ms"), form)

    job = poll.enqueue()
    work_until(app, lambda: found(app, job.id).state.ended)
    record = found(app, job.id)
    assert (record.state, record.result, record.attempt) == (State.SUCCEEDED, "done", 1)
    assert seen == [1, 1, 1]


def test_j15_a_snoozed_job_is_not_run_before_its_time(app: Duly) -> None:
    @app.task
    async def poll() -> None:
        raise Snooze("1h")

    job = poll.enqueue()
    work(app)
    record = found(app, job.id)
    assert (record.state, record.attempt, record.error) == (State.SCHEDULED, 0, None)
    assert record.due_at is not None
    assert 3_590_000 < record.due_at - record.created_at < 3_700_000
    assert app.driver.run(ops.attempts(job.id)) == []


@pytest.mark.parametrize("form", ["raised", "returned"])
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_j15_cancel_ends_the_job_cancelled_with_its_reason(app: Duly, form: str, kind: str) -> None:
    def give_up() -> Any:
        return leave(Cancel("no longer wanted"), form)

    async def agive_up() -> Any:
        return leave(Cancel("no longer wanted"), form)

    task: Any = app.task(give_up) if kind == "sync" else app.task(agive_up)
    job = task.enqueue()
    work(app)
    record = found(app, job.id)
    assert (record.state, record.reason) == (State.CANCELLED, "no longer wanted")


@pytest.mark.parametrize("form", ["raised", "returned"])
def test_j15_retry_after_overrides_the_backoff(app: Duly, form: str) -> None:
    seen: list[int] = []

    @app.task(backoff=backoff.fixed("1h"), retry_on=KeyError)
    def call(ctx: SyncCtx) -> Any:
        seen.append(ctx.attempt)
        return leave(Retry("busy", after="50ms"), form) if len(seen) == 1 else "ok"

    job = call.enqueue()
    work_until(app, lambda: found(app, job.id).state.ended)
    assert (found(app, job.id).result, seen) == ("ok", [1, 2])
    [attempt] = app.driver.run(ops.attempts(job.id))
    assert "busy" in (attempt.error or "")


def test_j15_retry_without_a_time_uses_the_backoff_and_counts(app: Duly) -> None:
    @app.task(backoff=backoff.fixed("1h"), max_attempts=2)
    def call() -> None:
        raise Retry("busy")

    job = call.enqueue()
    work(app)
    record = found(app, job.id)
    assert (record.state, record.attempt, record.reason) == (State.SCHEDULED, 1, "busy")
    assert record.due_at is not None
    assert record.due_at - record.created_at > 3_590_000


def test_j15_a_retry_on_the_last_attempt_is_the_end(app: Duly) -> None:
    @app.task(max_attempts=1)
    def call() -> None:
        raise Retry("busy", after=0) from ValueError("503")

    job = call.enqueue()
    work(app)
    record = found(app, job.id)
    assert (record.state, record.reason, record.error) == (State.DEAD, "busy", "ValueError: 503")


def leave(signal: Any, form: str) -> Any:
    if form == "raised":
        raise signal
    return signal


class Timeout(Exception):
    pass


class Slow(Timeout):
    pass


@pytest.mark.parametrize(
    ("options", "error", "state"),
    [
        ({"retry_on": Timeout}, Slow("x"), State.SCHEDULED),
        ({"retry_on": Timeout}, ValueError("x"), State.DEAD),
        ({"retry_on": (KeyError, Timeout)}, Slow("x"), State.SCHEDULED),
        ({"retry_on": lambda error: "again" in str(error)}, ValueError("again"), State.SCHEDULED),
        ({"retry_on": lambda error: "again" in str(error)}, ValueError("no"), State.DEAD),
        ({"give_up_on": Timeout}, Slow("x"), State.DEAD),
        ({"give_up_on": Timeout}, ValueError("x"), State.SCHEDULED),
        ({"give_up_on": (KeyError, Slow)}, Timeout("x"), State.SCHEDULED),
        ({"give_up_on": lambda error: error.args == ("x",)}, ValueError("x"), State.DEAD),
        ({"retry_on": Timeout, "give_up_on": Slow}, Slow("x"), State.DEAD),
        ({"retry_on": Timeout, "give_up_on": Slow}, Timeout("x"), State.SCHEDULED),
        ({"retry_on": lambda error: 1 / 0}, ValueError("x"), State.SCHEDULED),
    ],
)
def test_r02_only_retryable_errors_are_retried(
    app: Duly, options: dict[str, Any], error: Exception, state: State
) -> None:
    @app.task(**options)
    def fail() -> None:
        raise error

    job = fail.enqueue()
    work(app)
    record = found(app, job.id)
    assert (record.state, record.attempt) == (state, 1)
    assert (record.reason == "not retried") is (state is State.DEAD)


def test_j16_an_unawaited_coroutine_returned_by_a_handler_is_an_error(app: Duly) -> None:
    async def inner() -> None: ...

    @app.task
    def forgot() -> Any:
        return inner()

    job = forgot.enqueue()
    work(app)
    record = found(app, job.id)
    assert record.state is State.DEAD
    assert "returned a coroutine, which was not run: await it" in (record.error or "")


def test_a_result_that_cannot_be_stored_is_dead_and_not_retried(app: Duly) -> None:
    calls: list[int] = []

    @app.task
    def odd() -> Any:
        calls.append(1)
        return object()

    job = odd.enqueue()
    work(app)
    record = found(app, job.id)
    assert (record.state, record.reason, calls) == (State.DEAD, "its result cannot be stored", [1])


# Jobs of another version of the code


def test_u01_arguments_that_no_longer_fit_are_retried_for_any_retry_on(apps: Callable[..., Duly]) -> None:
    old, new = apps(), apps()

    @old.task(name="f")
    def before(number: int) -> None: ...

    @new.task(name="f", retry_on=KeyError, backoff=backoff.fixed("50ms"), max_attempts=3)
    def after(order: int) -> None: ...

    job = before.using(max_attempts=3).enqueue(1)
    work_until(new, lambda: found(new, job.id).state.ended)
    record = found(new, job.id)
    assert (record.state, record.reason, record.attempt) == (State.DEAD, "does not fit", 3)
    assert "argument `order` (int) is missing" in (record.error or "")
    assert len(new.driver.run(ops.attempts(job.id))) == 3


def test_u01_a_job_that_does_not_fit_here_waits_for_one_it_fits(apps: Callable[..., Duly]) -> None:
    old, new = apps(), apps()

    @old.task(name="f", backoff=backoff.fixed("1h"))
    def before(number: int) -> None: ...

    @new.task(name="f")
    def after(order: int) -> int:
        return order

    job = after.enqueue(7)
    work(old)
    record = found(old, job.id)
    assert (record.state, record.reason, record.attempt) == (State.SCHEDULED, "does not fit", 1)
    new.retry(job.id)
    work_until(new, lambda: found(new, job.id).state.ended)
    assert found(new, job.id).result == 7


def test_u01_a_newer_schema_version_is_parked_and_woken_by_a_worker_that_knows_it(apps: Callable[..., Duly]) -> None:
    old, new = apps(), apps()

    @old.task(name="f", max_attempts=1)
    def before(number: int) -> int:
        raise AssertionError

    @new.task(name="f", max_attempts=1, schema_version=2)
    def after(number: int) -> int:
        return number

    job = after.enqueue(1)
    work(old)
    record = found(old, job.id)
    assert (record.state, record.attempt) == (State.WAITING, 0)
    assert record.reason == "parked: needs schema version 2 of task 'f'"
    assert "schema version 2" in str(old.why(job.id))
    work_until(old, lambda: True)
    assert found(old, job.id).state is State.WAITING  # a worker that does not know it does not wake it
    work_until(new, lambda: found(new, job.id).state.ended)
    assert (found(new, job.id).state, found(new, job.id).result) == (State.SUCCEEDED, 1)


def test_u01_this_version_works_on_the_schema_of_the_next(app: Duly, outside: Outside) -> None:
    if outside.kind == "d1":
        app.driver.database.lose = None  # type: ignore[attr-defined]
    for table in (
        "duly_job",
        "duly_done",
        "duly_key",
        "duly_attempt",
        "duly_worker",
        "duly_event",
        "duly_queue",
        "duly_schedule",
        "duly_fire",
    ):
        outside.query(f"alter table {table} add column colour text")
    next_version = migrate.newest("sqlite") + 1
    outside.query("update duly_meta set value = ? where name = 'schema'", str(next_version))
    app.close() if outside.kind != "d1" else None

    @app.task(key=lambda number: f"k{number}", max_attempts=2, backoff=[0])
    def f(ctx: SyncCtx, number: int) -> int:
        ctx.progress(10)
        if ctx.attempt == 1:
            raise ValueError
        return number

    @app.task(max_attempts=1)
    def g() -> None:
        raise ValueError

    job, dead = f.enqueue(3), g.enqueue()
    work_until(app, lambda: found(app, job.id).state.ended and found(app, dead.id).state.ended)
    assert job.result(timeout=5) == 3
    assert f.enqueue(3).deduplicated
    assert app.dead.replay(dead.id)
    app.pause(queue="default", by="me")
    assert app.resume(queue="default", by="me")


def test_an_alias_serves_jobs_under_the_old_name(apps: Callable[..., Duly]) -> None:
    old, new = apps(), apps()

    @old.task(name="send")
    def before(number: int) -> None: ...

    @new.task(name="deliver", aliases=["send"])
    def after(number: int) -> int:
        return number

    jobs = [before.enqueue(1), after.enqueue(2)]
    work(new)
    assert [found(new, job.id).result for job in jobs] == [1, 2]
    assert [found(new, job.id).task for job in jobs] == ["send", "deliver"]


def test_an_option_that_does_not_exist_is_refused_with_the_one_that_was_meant(plain: Duly) -> None:
    def handler() -> None: ...

    assert refusal(lambda: plain.task(max_attempt=3)(handler)) == (  # type: ignore[call-arg]
        "a task has no option max_attempt=: did you mean max_attempts=?"
    )
    assert "the options are name, aliases, queue" in refusal(lambda: plain.task(colour=1)(handler))  # type: ignore[call-arg]
    assert plain.tasks == {}


def test_j03_options_beside_the_function_are_taken_or_refused(plain: Duly) -> None:
    def handler() -> None: ...

    task = plain.task(queue="mail", max_attempts=3)(handler, name="other", max_attempts=1)
    assert (task.name, task.definition.queue, task.definition.max_attempts) == ("other", "mail", 1)
    assert refusal(lambda: plain.task(handler, max_attempt=1)) == (  # type: ignore[call-overload]
        "a task has no option max_attempt=: did you mean max_attempts=?"
    )
    assert list(plain.tasks) == ["other"]


def test_the_options_that_are_typed_are_those_that_are_read() -> None:
    _, *typed = inspect.signature(get_overloads(TaskDecorator.__call__)[-1]).parameters.values()
    assert tuple(option.name for option in typed) == OPTIONS
    assert {option.name: option.annotation for option in typed} == {
        name: hint.__forward_arg__ for name, hint in TaskOptions.__annotations__.items()
    }


def test_enqueue_many_of_other_objects_raises_with_the_remedy(plain: Duly) -> None:
    @plain.task
    def send(order: int) -> None: ...

    assert refusal(lambda: send.enqueue_many([1, 2])) == (  # type: ignore[list-item]
        "send.enqueue_many got 1, which is no call: write send.enqueue_many(send.call(…) for …)"
    )
    # What a call is called with may be a secret.
    assert refusal(lambda: send.enqueue_many([[send.call(4711)]])) == (  # type: ignore[list-item]
        "send.enqueue_many got [<call of send>], which is no call: write send.enqueue_many(send.call(…) for …)"
    )
