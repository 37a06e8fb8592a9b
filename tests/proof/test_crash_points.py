"""The recorder, the disk and the judge of P2 are judged: a tiny run, and images spoiled by hand."""

from __future__ import annotations

import multiprocessing
import random
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.proof import crashes
from tests.proof.breaks import broken
from tests.proof.crashes import NAME, Judge
from tests.proof.disk import SECTOR, Disk, Event, lay_down
from tests.proof.rows import p02_crash_points

STEPS = 9


def apart(work: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Have it done in a process of its own: a second SQLite library is nothing for the one that runs the tests."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, args, options)


@pytest.fixture
def folder():
    with crashes.folder_in_memory() as place:
        yield place


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return apart(crashes.record, 7, STEPS, tmp_path_factory.mktemp("record"))


@pytest.mark.slow
def test_a_short_workload_is_correct_at_every_crash_point(folder):
    tally = apart(p02_crash_points.judged, 7, steps=STEPS, cuts=1, folder=folder)
    assert tally.wrong == []
    assert tally.crashes["kill"] > 100
    assert tally.crashes["power cut"] > 100
    assert {"open", "plain", "keyed", "batch", "claim", "finish", "fatal"} <= set(tally.kinds)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("control", "kind"), [("sync_full", "lost"), ("sync_at_all", "corrupt"), ("one_commit", "half-done")]
)
def test_each_control_is_found_by_its_check(control, kind, folder):
    assert control in p02_crash_points.ROW.controls
    with broken(control):
        tally = apart(p02_crash_points.judged, 7, steps=STEPS + 3, cuts=1, folder=folder)
    assert kind in {one.kind for one in tally.wrong}


def test_a_recording_follows_from_its_seed(recorded, tmp_path):
    assert apart(crashes.record, 7, STEPS, tmp_path) == recorded


def test_a_replayed_recording_gives_the_original_files(recorded):
    *_, (point, crash, image) = [one for one in crashes.images(recorded, random.Random(1), 1) if one[1] == "kill"]
    assert (point, crash) == (recorded.answers[-1].at, "kill")
    assert image == recorded.files
    other = replace(recorded, files={**recorded.files, NAME: b"!"})
    with pytest.raises(AssertionError, match="does not give the files"):
        list(crashes.images(other, random.Random(1), 1))


def test_checkpoints_and_commits_sync_what_they_write(recorded):
    assert {(event.what, event.file) for event in recorded.log} >= {
        ("sync", NAME), ("sync", f"{NAME}-wal"), ("truncate", f"{NAME}-wal"), ("delete", f"{NAME}-journal"),
    }  # fmt: skip
    assert recorded.log[recorded.answers[-1].at - 1] == Event("sync", f"{NAME}-wal")


def write(disk: Disk, at: int, data: bytes) -> None:
    disk.take(Event("write", "f", at, data))


def sync(disk: Disk) -> None:
    disk.take(Event("sync", "f"))


def cuts(disk: Disk) -> set[bytes | None]:
    return {disk.after_power_cut(random.Random(seed)).get("f") for seed in range(200)}


def test_a_power_cut_keeps_synced_data():
    disk = Disk()
    write(disk, 0, b"a" * 3 * SECTOR)
    assert None in cuts(disk)
    sync(disk)
    assert not disk.in_doubt
    assert cuts(disk) == {b"a" * 3 * SECTOR}


def test_a_power_cut_leaves_any_of_the_sectors_written_since_and_a_kill_leaves_all():
    disk = Disk()
    write(disk, 0, b"a" * 2 * SECTOR)
    sync(disk)
    write(disk, SECTOR // 2, b"b" * SECTOR)
    half = SECTOR // 2
    old, new = b"a" * half, b"b" * half
    assert cuts(disk) == {
        old + old + old + old, old + new + old + old, old + old + new + old, old + new + new + old,
    }  # fmt: skip
    assert disk.after_kill() == {"f": old + new + new + old}


def test_a_sector_has_the_content_of_one_moment():
    disk = Disk()
    write(disk, 0, b"...")
    sync(disk)
    for at, letter in enumerate((b"a", b"b", b"c")):
        write(disk, at, letter)
    assert cuts(disk) == {b"...", b"a..", b"ab.", b"abc"}


def test_a_file_that_was_cut_or_deleted_may_be_as_before_until_it_is_synced():
    disk = Disk()
    write(disk, 0, b"abc")
    sync(disk)
    disk.take(Event("truncate", "f", 1))
    assert cuts(disk) == {b"abc", b"a"}
    sync(disk)
    assert cuts(disk) == {b"a"}
    disk.take(Event("delete", "f", 0))
    assert disk.after_kill() == {}
    assert cuts(disk) == {b"a", None}


def test_a_deleted_file_with_a_synced_folder_stays_deleted():
    disk = Disk()
    write(disk, 0, b"abc")
    sync(disk)
    disk.take(Event("delete", "f", 1))
    assert cuts(disk) == {None}


def test_the_judge_finds_a_spoiled_page(recorded, folder):
    spoiled = bytearray(recorded.files[NAME])
    spoiled[4096 * 3 : 4096 * 4] = b"\xff" * 4096
    verdict = Judge(recorded, folder).judge({NAME: bytes(spoiled)}, len(recorded.log))
    assert verdict is not None
    assert verdict[0] == "corrupt"


def test_the_judge_finds_missing_acknowledged_jobs(recorded, folder):
    disk = Disk()
    for event in recorded.log[: recorded.answers[-3].at]:
        disk.take(event)
    image = disk.after_kill()
    assert Judge(recorded, folder).judge(image, recorded.answers[-3].at) is None
    verdict = Judge(recorded, folder).judge(image, recorded.answers[-1].at)
    assert verdict is not None
    assert verdict[0] == "lost"


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        ("delete from duly_key", "does not have the key"),
        ("delete from duly_job where key is not null", "a live key is that of no live job"),
        ("update duly_batch set open = open + 1", "counters of a batch"),
        ("insert into duly_attempt (job_id, attempt, at, outcome) values ('x', 1, 0, 'failed')", "has gone"),
        ("update duly_done set prune_at = -1 where state <> 'dead'", "marked to be pruned"),
        ("update duly_job set priority = priority + 1", "neither as it was before"),
    ],
)
def test_the_judge_finds_partial_writes(spoil, text, recorded, folder):
    lay_down(recorded.files, folder)
    conn = sqlite3.connect(folder / NAME)
    with conn:
        assert conn.execute(spoil).rowcount > 0
    conn.close()
    image = {NAME: (folder / NAME).read_bytes()}
    verdict = Judge(recorded, folder).judge(image, len(recorded.log))
    assert verdict is not None
    assert verdict[0] == "half-done"
    assert text in verdict[1]


@pytest.mark.slow
def test_every_operation_is_recorded_sooner_or_later(tmp_path):
    kinds = {answer.name for answer in apart(crashes.record, 7, 250, tmp_path).answers}
    assert kinds == {"open", *crashes._START, *crashes._OFTEN, *crashes._SELDOM} - {"checkpoint"}
