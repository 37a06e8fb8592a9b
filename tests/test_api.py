"""The public names, and the errors with their codes: people and programs rely on both."""

from __future__ import annotations

import inspect
import re
import types

import pytest

import duly
from duly import errors
from duly.app import batches, dead, schedules

PUBLIC = {"Batch", "Call", "Cancel", "Ctx", "Duly", "Job", "Retry", "Snooze", "SyncCtx", "Task", "backoff"}


def test_the_public_names_are_these_and_no_others() -> None:
    found = {
        name
        for name, value in ((name, getattr(duly, name)) for name in dir(duly))  # imported when first asked for
        if not name.startswith("_")
        and (name in PUBLIC or not isinstance(value, types.ModuleType))  # submodules become attributes too
    }
    assert found == PUBLIC
    assert set(duly.__all__) == PUBLIC
    assert re.fullmatch(r"\d+\.\d+\.\d+", duly.__version__)


def classes() -> list[type[errors.DulyError]]:
    return [
        one
        for one in vars(errors).values()
        if inspect.isclass(one) and issubclass(one, errors.DulyError) and one.__module__ == errors.__name__
    ]


def drawn() -> list[tuple[str, str]]:
    """The tree in the docstring as pairs of a name and the name it hangs from."""
    assert errors.__doc__ is not None
    pairs, path = [], {0: ""}
    for line in errors.__doc__.splitlines():
        match = re.match(r"((?:│   |    )*)(├── |└── )?([A-Z]\w+)(?:\s{2,}|$)", line)
        if match:
            depth = len(match[1]) // 4 + bool(match[2])
            pairs.append((match[3], path[depth]))
            path[depth + 1] = match[3]
    return pairs


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    real = [
        (one.__name__, "" if one is errors.DulyError else one.__base__.__name__)  # type: ignore[union-attr]
        for one in classes()
    ]
    assert sorted(drawn()) == sorted(real)
    assert len(real) > 15


def test_every_error_has_a_docstring_and_a_code_of_its_own() -> None:
    codes = {one.__name__: vars(one).get("code") for one in classes()}
    assert len(set(codes.values())) == len(codes)
    assert None not in codes.values()
    assert all(re.fullmatch(r"[a-z]+(?:_[a-z]+)*", code) for code in codes.values())
    assert all(one.__doc__ for one in classes())


def test_the_codes_are_stable() -> None:
    assert {one.__name__: one.code for one in classes()} == {
        "DulyError": "duly_error",
        "ConfigError": "config",
        "PayloadError": "payload",
        "BadArguments": "bad_arguments",
        "PayloadTooLarge": "payload_too_large",
        "JobError": "job",
        "JobNotFound": "job_not_found",
        "JobDead": "job_dead",
        "JobCancelled": "job_cancelled",
        "JobTimeout": "job_timeout",
        "ResultExpired": "result_expired",
        "LeaseLost": "lease_lost",
        "NotReplayable": "not_replayable",
        "TransitionRefused": "transition_refused",
        "ScheduleNotFound": "schedule_not_found",
        "ScheduleExists": "schedule_exists",
        "BatchNotFound": "batch_not_found",
        "BatchSealed": "batch_sealed",
        "KeyConflict": "key_conflict",
        "QueueFull": "queue_full",
        "StoreError": "store",
        "StoreUnavailable": "store_unavailable",
        "AnswerLost": "answer_lost",
        "EnqueueUnknown": "enqueue_unknown",
        "SchemaMismatch": "schema_mismatch",
        "StoreRefused": "store_refused",
    }


def test_an_error_about_a_job_or_a_key_names_it() -> None:
    assert errors.JobDead("it died", "id 1").job_id == "id 1"
    assert errors.KeyConflict("taken", "id 2").existing_id == "id 2"


# Sync calls that have no async twin by the name of `a…`, and why.
ALONE = {
    "Duly.at": "no I/O",
    "Duly.batch": "no I/O: `async with` is its twin",
    "Duly.every": "no I/O",
    "Duly.worker": "no I/O: `await worker.run()`",
    "Batch.known": "no I/O",
    "Batch.new": "no I/O",
    "Batch.wait": "its twin is `await_`, as `await` is a word of Python",
    "Task.call": "no I/O",
    "Task.using": "no I/O",
}


@pytest.mark.parametrize(
    "kind", [duly.Duly, duly.Batch, batches.Batches, dead.Dead, schedules.Schedules, duly.Task, duly.Job]
)
def test_every_sync_call_has_an_async_twin(kind: type) -> None:
    calls = {name for name, member in inspect.getmembers(kind, inspect.isroutine) if not name.startswith("_")}
    plain = {name for name in calls if not inspect.iscoroutinefunction(getattr(kind, name))}
    alone = {name for name in plain if f"a{name}" not in calls - plain}
    assert alone == {name.partition(".")[2] for name in ALONE if name.startswith(f"{kind.__name__}.")}
    for name in plain - alone:
        mine, twin = (list(inspect.signature(getattr(kind, one)).parameters) for one in (name, f"a{name}"))
        assert mine == twin, name
