"""Backup and restore of a SQLite file: in use or not, whole or not at all, and nothing runs by surprise afterwards."""

from __future__ import annotations

import errno
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from duly.errors import ConfigError, SchemaMismatch, StoreError, StoreUnavailable
from duly.model import Change, HoldFigure, NewJob, State, Terms, Verdict
from duly.store import caller, migrate, ops
from duly.store.op import Finish
from duly.store.sqlite import backup as backups
from duly.store.sqlite.backup import backup, check_restore, opened_to_look, restore
from duly.store.sqlite.driver import SQLiteDriver
from tests.contract.stores import new_id

WIDE = '{"x":"' + "y" * 900 + '"}'


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[SQLiteDriver]:
    """A database in use."""
    made = SQLiteDriver(tmp_path / "jobs.db")
    made.run(ops.clock())
    yield made
    made.close()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backups, "COPY_PAGES", 20)


def enqueue(driver: SQLiteDriver, count: int = 1, payload: str = WIDE, **terms: Any) -> list[str]:
    jobs = [NewJob(new_id(), payload) for _ in range(count)]
    driver.run(ops.enqueue(Terms(**{"task": "work", **terms}), jobs))
    return [job.id for job in jobs]


def asked(path: Path, sql: str) -> list[tuple[Any, ...]]:
    conn = sqlite3.connect(path, isolation_level=None)
    try:
        conn.execute("pragma wal_autocheckpoint = 0")
        return conn.execute(sql).fetchall()
    finally:
        conn.close()


def jobs_of(path: Path) -> set[str]:
    return {row[0] for row in asked(path, "select id from duly_job")}


def is_whole(path: Path) -> bool:
    return asked(path, "pragma integrity_check") == [("ok",)]


def leftovers(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir() if "draft" in file.name)


# Backup


def test_a_backup_is_a_whole_database_in_one_file(driver: SQLiteDriver, tmp_path: Path) -> None:
    ids = enqueue(driver, 50)
    target = tmp_path / "copy" / "backup.db"
    target.parent.mkdir()
    backup(driver.path, target)
    assert [file.name for file in target.parent.iterdir()] == ["backup.db"]
    assert asked(target, "pragma journal_mode") == [("delete",)]  # so that it can be read from a read-only disk
    assert is_whole(target)
    assert jobs_of(target) == set(ids)


def test_a_backup_opens_as_any_other_database(driver: SQLiteDriver, tmp_path: Path) -> None:
    (job_id,) = enqueue(driver)
    backup(driver.path, tmp_path / "backup.db")
    copy = SQLiteDriver(tmp_path / "backup.db")
    assert [job.id for job in copy.run(ops.claim("default", limit=9, token=1, worker="w"))] == [job_id]
    assert asked(copy.path, "pragma journal_mode") == [("wal",)]
    copy.close()
    assert [job.state for job in driver.run(ops.listing())] == [State.READY]


@pytest.mark.usefixtures("small_chunks")
def test_a_backup_is_of_one_moment_and_ends_although_others_write_all_the_time(
    driver: SQLiteDriver, tmp_path: Path
) -> None:
    ids = enqueue(driver, 500)
    calls: list[tuple[int, int]] = []

    def write_meanwhile(done: int, total: int) -> None:
        calls.append((done, total))
        assert len(calls) < 1000, "it begins anew with each write"
        (job,) = driver.run(ops.claim("default", limit=1, token=len(calls), worker="w"))
        driver.run(ops.finish([Finish(job, Change(State.SUCCEEDED))]))
        enqueue(driver, 3)

    backup(driver.path, tmp_path / "backup.db", progress=write_meanwhile)
    assert len(calls) > 10
    assert calls == sorted(calls)
    assert calls[-1][0] == calls[-1][1]
    assert jobs_of(tmp_path / "backup.db") == set(ids)
    assert asked(tmp_path / "backup.db", "select count(*) from duly_done") == [(0,)]
    assert is_whole(tmp_path / "backup.db")


def test_a_backup_has_the_rights_of_the_original(driver: SQLiteDriver, tmp_path: Path) -> None:
    os.chmod(driver.path, 0o640)
    backup(driver.path, tmp_path / "backup.db")
    assert (tmp_path / "backup.db").stat().st_mode & 0o777 == 0o640


def test_a_backup_replaces_a_file_only_with_force(driver: SQLiteDriver, tmp_path: Path) -> None:
    (first,) = enqueue(driver)
    target = tmp_path / "backup.db"
    backup(driver.path, target)
    (second,) = enqueue(driver)
    with pytest.raises(ConfigError, match="exists already"):
        backup(driver.path, target)
    assert jobs_of(target) == {first}
    backup(driver.path, target, replace=True)
    assert jobs_of(target) == {first, second}


def test_a_backup_never_replaces_the_database_itself_nor_one_in_use(driver: SQLiteDriver, tmp_path: Path) -> None:
    ids = enqueue(driver, 3)
    with pytest.raises(ConfigError, match="is the database itself"):
        backup(driver.path, driver.path, replace=True)
    other = SQLiteDriver(tmp_path / "other.db")
    enqueue(other)
    with pytest.raises(ConfigError, match=r"other\.db-wal is there: a program uses"):
        backup(driver.path, other.path, replace=True)
    other.close()
    assert jobs_of(driver.path) == set(ids)


def test_only_duly_databases_are_backed_up(tmp_path: Path) -> None:
    target = tmp_path / "backup.db"
    with pytest.raises(ConfigError, match="there is no database"):
        backup(tmp_path / "missing.db", target)
    (tmp_path / "text.db").write_text("not a database, whatever its name says, and long enough to be read" * 20)
    with pytest.raises(StoreError, match="is not a database"):
        backup(tmp_path / "text.db", target)
    asked(tmp_path / "other.db", "create table shop (id integer)")
    with pytest.raises(ConfigError, match="is not a database of duly"):
        backup(tmp_path / "other.db", target)
    with pytest.raises(ConfigError, match="does not exist"):
        backup(tmp_path / "other.db", tmp_path / "no folder" / "backup.db")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["other.db", "text.db"]


@pytest.mark.usefixtures("small_chunks")
def test_an_interrupted_backup_leaves_no_file(driver: SQLiteDriver, tmp_path: Path) -> None:
    enqueue(driver, 200)

    def give_up(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        backup(driver.path, tmp_path / "backup.db", progress=give_up)
    assert not (tmp_path / "backup.db").exists()
    assert leftovers(tmp_path) == []


def test_a_file_created_at_the_target_during_a_backup_is_kept(driver: SQLiteDriver, tmp_path: Path) -> None:
    target = tmp_path / "backup.db"
    with pytest.raises(ConfigError, match="exists already"):
        backup(driver.path, target, progress=lambda *_: target.write_text("something dear"))
    assert target.read_text() == "something dear"
    assert leftovers(tmp_path) == []


def test_a_backup_works_without_hard_links(
    driver: SQLiteDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "as on FAT")

    monkeypatch.setattr(os, "link", refuse)
    (job_id,) = enqueue(driver)
    target = tmp_path / "backup.db"
    backup(driver.path, target)
    assert jobs_of(target) == {job_id}
    with pytest.raises(ConfigError, match="exists already"):
        backup(driver.path, tmp_path / "2.db", progress=lambda *_: (tmp_path / "2.db").touch())
    assert (tmp_path / "2.db").read_bytes() == b""


def test_a_backup_is_written_to_where_a_link_leads(driver: SQLiteDriver, tmp_path: Path) -> None:
    (job_id,) = enqueue(driver)
    (tmp_path / "disk").mkdir()
    link, real = tmp_path / "backup.db", tmp_path / "disk" / "real.db"
    link.symlink_to(real)
    for replace in (False, True):
        backup(driver.path, link, replace=replace)
        assert link.is_symlink()
        assert jobs_of(real) == {job_id}


def test_a_backup_never_replaces_a_special_file(driver: SQLiteDriver, saved: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to(pipe)
    for target in (pipe, tmp_path / "link"):
        with pytest.raises(ConfigError, match="pipe is no regular file"):
            backup(driver.path, target, replace=True)
        with pytest.raises(ConfigError, match="pipe is no regular file"):
            restore(saved, target, force=True)
    assert pipe.is_fifo()


def full(*_: object) -> None:
    """Fail as SQLite does when the disk is full."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as conn:
        conn.execute("pragma max_page_count = 1")
        conn.execute("create table t (x)")
        conn.execute("create table u (x)")


def test_a_full_disk_is_the_one_that_is_written_to(driver: SQLiteDriver, saved: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match=r"the disk of .*new\.db is full"):
        backup(driver.path, tmp_path / "new.db", progress=full)
    with pytest.raises(StoreUnavailable, match=r"the disk of .*new\.db is full"):
        restore(saved, tmp_path / "new.db", progress=full)
    with pytest.raises(StoreUnavailable, match=r"the disk of .*jobs\.db is full"):
        restore(saved, driver.path, progress=full)
    assert leftovers(tmp_path) == []


LIMITED = """
import resource, sys
from duly.store.sqlite.backup import backup
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
backup(sys.argv[1], sys.argv[2])
"""


def test_a_backup_over_the_file_size_limit_names_the_file(driver: SQLiteDriver, tmp_path: Path) -> None:
    command = [sys.executable, "-c", LIMITED, str(driver.path), str(tmp_path / "new.db")]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert re.search(r"StoreUnavailable: backup: .*new\.db cannot be used \(disk I/O error\)", answer.stderr)
    assert not (tmp_path / "new.db").exists()


# Drafts


def test_drafts_of_killed_processes_are_removed_by_the_next_to_the_same_place(
    driver: SQLiteDriver, tmp_path: Path
) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    gone = [f".b.db.{dead.pid}.00aaff.draft{ending}" for ending in ("", "-journal", "-wal", "-shm")]
    gone += [f".b.db.{os.getpid()}.00aaff.draft", ".b.db.99999999999999.00aaff.draft"]  # a pid is given again
    stay = [f".b.db.{os.getppid()}.00aaff.draft", f".c.db.{dead.pid}.00aaff.draft", f".b.db.{dead.pid}.mine.draft"]
    for name in (*gone, *stay):
        (tmp_path / name).touch()
    backup(driver.path, tmp_path / "b.db")
    assert leftovers(tmp_path) == sorted(stay)


def test_two_backups_of_a_process_to_one_place_leave_each_others_drafts_alone(
    driver: SQLiteDriver, tmp_path: Path
) -> None:
    ids = enqueue(driver, 3)
    target = tmp_path / "b.db"
    backup(driver.path, target, replace=True, progress=lambda *_: backup(driver.path, target, replace=True))
    assert jobs_of(target) == set(ids)
    assert leftovers(tmp_path) == []


def test_a_removed_draft_is_not_treated_as_an_empty_database(driver: SQLiteDriver, saved: Path, tmp_path: Path) -> None:
    def remove(*_: object) -> None:
        for draft in tmp_path.glob(".new.db.*.draft"):
            draft.unlink()

    for make, source in ((backup, driver.path), (restore, saved)):
        with pytest.raises(StoreUnavailable, match=r"new\.db cannot be used"):
            make(source, tmp_path / "new.db", progress=remove)
        assert not (tmp_path / "new.db").exists()


# Restore


@pytest.fixture
def saved(driver: SQLiteDriver, tmp_path: Path) -> Path:
    """A backup of a database with one running job, one that is ready, one that is put off."""
    enqueue(driver, 2)
    enqueue(driver, queue="later", delay_ms=500_000)
    driver.run(ops.claim("default", limit=1, token=7, worker="w"))
    backup(driver.path, tmp_path / "backup.db")
    return tmp_path / "backup.db"


def test_a_backup_is_restored_to_a_new_place_and_is_not_changed_by_it(saved: Path, tmp_path: Path) -> None:
    before = saved.read_bytes()
    target = tmp_path / "new" / "jobs.db"
    target.parent.mkdir()
    assert restore(saved, target) is None
    assert [file.name for file in target.parent.iterdir()] == ["jobs.db"]
    assert jobs_of(target) == jobs_of(saved)
    assert is_whole(target)
    assert saved.read_bytes() == before
    assert leftovers(tmp_path) == []


@pytest.mark.usefixtures("small_chunks")
def test_a_file_created_at_the_target_during_a_restore_is_replaced_with_its_wal(saved: Path, tmp_path: Path) -> None:
    app = SQLiteDriver(tmp_path / "new.db")
    acknowledged: list[str] = []
    restore(saved, app.path, progress=lambda *_: acknowledged.extend([] if acknowledged else enqueue(app)))
    assert {job.id for job in app.run(ops.listing())} == jobs_of(saved)
    (late,) = enqueue(app)
    app.close()
    assert jobs_of(app.path) == {*jobs_of(saved), late}
    assert is_whole(app.path)
    assert leftovers(tmp_path) == []


def test_a_file_created_at_the_target_during_a_restore_is_checked_first(saved: Path, tmp_path: Path) -> None:
    app = SQLiteDriver(tmp_path / "new.db")

    def begin(*_: object) -> None:
        app.run(ops.register("host-1-ab", host="h", pid=1, queues=["default"], tasks=[], beat_ms=60_000))

    with pytest.raises(ConfigError, match="workers are alive"):
        restore(saved, app.path, progress=begin)
    assert len(app.run(ops.workers())) == 1
    app.close()


def test_a_read_only_backup_becomes_a_database_that_can_be_written(saved: Path, tmp_path: Path) -> None:
    saved.chmod(0o444)
    modes: list[int] = []
    restore(
        saved, tmp_path / "new.db",
        progress=lambda *_: modes.extend(draft.stat().st_mode & 0o777 for draft in tmp_path.glob(".new.db.*.draft")),
    )  # fmt: skip
    assert modes[0] == 0o644
    assert (tmp_path / "new.db").stat().st_mode & 0o777 == 0o644


def test_a_restore_follows_symbolic_links_on_both_sides(driver: SQLiteDriver, tmp_path: Path) -> None:
    ids = enqueue(driver, 5)
    (tmp_path / "disk").mkdir()
    for ending in ("", "-wal"):
        (tmp_path / "disk" / f"copied.db{ending}").write_bytes(Path(f"{driver.path}{ending}").read_bytes())
    (tmp_path / "latest.db").symlink_to(tmp_path / "disk" / "copied.db")
    (tmp_path / "new.db").symlink_to(tmp_path / "disk" / "new.db")  # it leads nowhere yet
    restore(tmp_path / "latest.db", tmp_path / "new.db")
    assert (tmp_path / "new.db").is_symlink()
    assert jobs_of(tmp_path / "disk" / "new.db") == set(ids)


@pytest.mark.parametrize("hold_by", [None, "ann"])
def test_the_workers_of_then_are_forgotten(driver: SQLiteDriver, tmp_path: Path, hold_by: str | None) -> None:
    driver.run(ops.register("host-1-ab", host="h", pid=1, queues=["default"], tasks=[], beat_ms=60_000))
    backup(driver.path, tmp_path / "backup.db")
    for _ in range(2):  # the second is not refused because of them
        restore(tmp_path / "backup.db", tmp_path / "new.db", hold_by=hold_by)
        assert asked(tmp_path / "new.db", "select id from duly_worker") == []
    assert asked(tmp_path / "backup.db", "select id from duly_worker") == [("host-1-ab",)]


def test_tables_that_the_backup_lacks_are_dropped_only_with_force(driver: SQLiteDriver, saved: Path) -> None:
    assert check_restore(saved, driver.path) == ()
    for sql in ("table orders (x)", "table b (x)", "table c (x)", "view d as select 1"):
        asked(driver.path, f"create {sql}")
    for refused in (check_restore, restore):
        with pytest.raises(ConfigError, match=r"tables that the backup lacks, and they would go \(b, c, d, …\)"):
            refused(saved, driver.path)
    assert asked(driver.path, "select count(*) from orders") == [(0,)]
    assert check_restore(saved, driver.path, force=True) == ("b", "c", "d", "orders")
    restore(saved, driver.path, force=True)
    assert asked(driver.path, "select name from sqlite_master where name in ('orders', 'b', 'c', 'd')") == []


def test_a_place_where_no_draft_can_be_made_is_refused_before_it_is_tried(saved: Path, tmp_path: Path) -> None:
    target = tmp_path / f"{'long' * 60}.db"
    for refused in (check_restore, restore):
        with pytest.raises(StoreUnavailable, match="cannot be written"):
            refused(saved, target)
    assert check_restore(saved, tmp_path / "new.db") == ()
    assert not (tmp_path / "new.db").exists()
    assert leftovers(tmp_path) == []


def test_tables_that_the_backup_also_has_need_no_force(driver: SQLiteDriver, tmp_path: Path) -> None:
    asked(driver.path, "create table orders (x)")
    backup(driver.path, tmp_path / "backup.db")
    restore(tmp_path / "backup.db", driver.path)


def test_a_damaged_target_must_be_moved_away_with_its_wal(saved: Path, tmp_path: Path) -> None:
    target = tmp_path / "bad.db"
    target.write_bytes(b"\xa5" * 8192)
    (tmp_path / "bad.db-shm").touch()
    with pytest.raises(StoreError, match=r"is damaged, .* move it away .* \(\S*bad\.db, \S*bad\.db-shm\)"):
        restore(saved, target, force=True)
    assert target.read_bytes() == b"\xa5" * 8192


def test_a_target_with_pages_of_another_size_is_to_be_moved_away(saved: Path, tmp_path: Path) -> None:
    target = SQLiteDriver(tmp_path / "other.db")
    with closing(sqlite3.connect(target.path, isolation_level=None)) as conn:
        conn.execute("pragma page_size = 8192")
        conn.execute("create table orders (x)")
    (job_id,) = enqueue(target)
    for refused in (check_restore, restore):
        with pytest.raises(StoreError, match=r"pages of .*other\.db have 8192 bytes, .* 4096: .*move it away"):
            refused(saved, target.path, force=True)
    target.close()
    assert jobs_of(target.path) == {job_id}


def test_a_backup_of_an_older_schema_can_be_read_and_is_migrated(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = migrate.newest("sqlite") + 1
    text = f"create table duly_extra (x); update duly_meta set value = '{number}' where name = 'schema'"
    steps = (*migrate.migrations("sqlite"), migrate.Migration(number, "extra", text))
    monkeypatch.setattr(migrate, "migrations", lambda dialect: steps)
    before = saved.read_bytes()
    with opened_to_look(saved) as conn:
        assert conn.execute("select count(*) from duly_extra").fetchone() == (0,)
        assert [figure.running for figure in caller.run(conn, ops.queues())] == [1, 0]
    for _ in range(2):
        restore(saved, tmp_path / "new.db")  # tables of duly that it lacks are no loss
        assert asked(tmp_path / "new.db", "select count(*) from duly_extra") == [(0,)]
    assert saved.read_bytes() == before


def test_a_backup_on_a_read_only_place_can_be_restored(saved: Path, tmp_path: Path) -> None:
    place = tmp_path / "read-only"
    place.mkdir()
    moved = saved.rename(place / "backup.db")
    place.chmod(0o500)
    try:
        restore(moved, tmp_path / "new.db")
        assert [file.name for file in place.iterdir()] == ["backup.db"]
    finally:
        place.chmod(0o700)
    assert len(jobs_of(tmp_path / "new.db")) == 3


@pytest.mark.usefixtures("small_chunks")
def test_a_plain_copy_of_the_file_can_be_restored_and_leaves_no_other_files(
    driver: SQLiteDriver, tmp_path: Path
) -> None:
    ids = enqueue(driver, 100)
    driver.close()
    place = tmp_path / "copied"
    place.mkdir()
    copied = driver.path.rename(place / "jobs.db")
    assert asked(copied, "pragma journal_mode") == [("wal",)]
    seen: set[str] = set()
    restore(copied, tmp_path / "new.db", progress=lambda *_: seen.update(file.name for file in place.iterdir()))
    assert seen == {"jobs.db"}
    assert jobs_of(tmp_path / "new.db") == set(ids)


def test_a_copy_with_its_wal_is_restored_with_the_wals_commits(driver: SQLiteDriver, tmp_path: Path) -> None:
    ids = enqueue(driver, 5)
    for ending in ("", "-wal"):
        (tmp_path / f"copied.db{ending}").write_bytes(Path(f"{driver.path}{ending}").read_bytes())
    restore(tmp_path / "copied.db", tmp_path / "new.db")
    assert jobs_of(tmp_path / "new.db") == set(ids)


def test_without_a_hold_restored_jobs_keep_their_state(saved: Path, tmp_path: Path) -> None:
    restore(saved, tmp_path / "new.db")
    states = asked(tmp_path / "new.db", "select state from duly_job order by id")
    assert states == [("running",), ("ready",), ("scheduled",)]


@pytest.mark.parametrize("there", [False, True], ids=["a new place", "over a database"])
def test_with_a_hold_no_restored_job_runs(driver: SQLiteDriver, saved: Path, tmp_path: Path, there: bool) -> None:
    target = driver.path if there else tmp_path / "new.db"
    (running,) = driver.run(ops.recall(7))
    assert restore(saved, target, hold_by="ann") == HoldFigure(jobs=1, queues=2, schedules=0)
    held = SQLiteDriver(target)
    assert held.run(ops.claim("default", limit=9, token=9, worker="w")) == []
    assert held.run(ops.claim("later", limit=9, token=9, worker="w")) == []
    assert held.run(ops.expired_leases()) == []
    assert held.run(ops.finish([Finish(running, Change(State.SUCCEEDED))])) == {running.id: Verdict.LOST}
    (told,) = [event for event in held.run(ops.events()) if event.name == "database.held"]
    assert (told.by, told.why) == ("ann", "restored from backup.db")
    held.run(ops.resume("queue", "default", by="ann", why="looked"))
    held.run(ops.retry([running.id]))
    assert {job.id for job in held.run(ops.claim("default", limit=9, token=9, worker="w"))} >= {running.id}
    held.close()
    assert asked(saved, "select state from duly_job where state = 'running'") == [("running",)]


def test_an_open_connection_sees_the_restored_data_and_keeps_working(driver: SQLiteDriver, saved: Path) -> None:
    inode = driver.path.stat().st_ino
    watching = sqlite3.connect(driver.path, isolation_level=None)
    assert watching.execute("select count(*) from duly_job").fetchone() == (3,)
    late = enqueue(driver, 400)
    restore(saved, driver.path)
    assert driver.path.stat().st_ino == inode
    assert watching.execute("select count(*) from duly_job").fetchone() == (3,)
    watching.close()
    assert len(driver.run(ops.listing())) == 3
    assert driver.run(ops.get(late[0])) is None
    enqueue(driver)
    assert len(driver.run(ops.listing())) == 4
    driver.close()
    assert is_whole(driver.path)


@pytest.mark.slow
def test_a_reader_in_a_transaction_sees_the_old_data_until_it_ends(driver: SQLiteDriver, saved: Path) -> None:
    enqueue(driver, 400)
    watching = sqlite3.connect(driver.path, isolation_level=None)
    watching.execute("begin")
    assert watching.execute("select count(*) from duly_job").fetchone() == (403,)
    restore(saved, driver.path)
    assert watching.execute("select count(*) from duly_job").fetchone() == (403,)
    watching.execute("commit")
    assert watching.execute("select count(*) from duly_job").fetchone() == (3,)
    watching.close()


def test_it_is_refused_while_workers_are_alive_unless_forced(driver: SQLiteDriver, saved: Path) -> None:
    driver.run(ops.register("host-1-ab", host="h", pid=1, queues=["default"], tasks=[], beat_ms=60_000))
    enqueue(driver)
    with pytest.raises(ConfigError, match=r"workers are alive in .* \(host-1-ab\): stop them first"):
        restore(saved, driver.path)
    assert len(driver.run(ops.listing())) == 4
    restore(saved, driver.path, force=True)
    assert len(driver.run(ops.listing())) == 3


def test_workers_that_stopped_beating_do_not_hinder_it(driver: SQLiteDriver, saved: Path) -> None:
    driver.run(ops.register("w", host="h", pid=1, queues=["default"], tasks=[], beat_ms=1000, now=1_000))
    restore(saved, driver.path)


def test_a_file_that_cannot_be_restored_is_refused_without_changes(
    driver: SQLiteDriver, saved: Path, tmp_path: Path
) -> None:
    enqueue(driver)
    before = jobs_of(driver.path)
    asked(tmp_path / "shop.db", "create table shop (id integer)")
    with pytest.raises(ConfigError, match=r"shop\.db is not a database of duly"):
        restore(tmp_path / "shop.db", driver.path)
    with pytest.raises(ConfigError, match="there is no database"):
        restore(tmp_path / "missing.db", driver.path)
    with pytest.raises(ConfigError, match="is the backup itself"):
        restore(driver.path, driver.path)
    asked(saved, "update duly_meta set value = '99'")
    with pytest.raises(SchemaMismatch, match="needs a newer duly"):
        restore(saved, driver.path)
    assert jobs_of(driver.path) == before
    assert leftovers(tmp_path) == []


def test_a_damaged_backup_is_refused(driver: SQLiteDriver, tmp_path: Path) -> None:
    enqueue(driver, 300)
    saved = tmp_path / "backup.db"
    backup(driver.path, saved)
    enqueue(driver)
    with saved.open("r+b") as file:
        for page in range(60, 90):
            file.seek(page * 4096)
            file.write(b"\xff" * 200)
    with pytest.raises(StoreError, match="is damaged"):
        restore(saved, driver.path)
    assert len(jobs_of(driver.path)) == 301


def test_another_programs_database_is_not_overwritten(saved: Path, tmp_path: Path) -> None:
    asked(tmp_path / "shop.db", "create table shop (id integer)")
    with pytest.raises(ConfigError, match="is not a database of duly"):
        restore(saved, tmp_path / "shop.db", force=True)
    assert asked(tmp_path / "shop.db", "select name from sqlite_master") == [("shop",)]


def test_a_log_without_its_database_is_not_believed(saved: Path, tmp_path: Path) -> None:
    log = tmp_path / "gone.db-wal"
    with pytest.raises(ConfigError, match=r"gone\.db-wal is there"):
        restore(saved, tmp_path / "gone.db", progress=lambda *_: log.write_bytes(b"it came meanwhile"))
    for refused in (check_restore, restore):
        with pytest.raises(ConfigError, match=r"gone\.db-wal is there"):
            refused(saved, tmp_path / "gone.db")
    assert not (tmp_path / "gone.db").exists()


def test_a_restore_to_a_locked_target_names_the_lock(
    driver: SQLiteDriver, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backups, "BUSY_SECONDS", 0.05)
    monkeypatch.setattr(
        SQLiteDriver.__init__, "__kwdefaults__", {**SQLiteDriver.__init__.__kwdefaults__, "busy_s": 0.05}
    )
    enqueue(driver)
    writing = sqlite3.connect(driver.path, isolation_level=None)
    writing.execute("begin immediate")
    with pytest.raises(StoreUnavailable, match="locked by another connection"):
        restore(saved, driver.path)
    writing.execute("rollback")
    writing.close()
    assert len(driver.run(ops.listing())) == 4


# Killed anywhere


KILLED = """
import os, sys
from duly.store.sqlite import backup
backup.COPY_PAGES = 20
calls = 0
def die_at(done, total):
    global calls
    calls += 1
    if calls == int(sys.argv[4]):
        os._exit(9)
getattr(backup, sys.argv[1])(sys.argv[2], sys.argv[3], progress=die_at)
print(calls)
"""


def killed_at(call: int, what: str, source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    """Run a backup or a restore in a process of its own that dies when its progress has been called so often."""
    return subprocess.run(
        [sys.executable, "-c", KILLED, what, str(source), str(target), str(call)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_a_backup_that_is_killed_leaves_no_half_of_one(driver: SQLiteDriver, tmp_path: Path) -> None:
    enqueue(driver, 300)
    calls = int(killed_at(0, "backup", driver.path, tmp_path / "first.db").stdout)
    assert calls > 5
    for call in (1, calls // 2, calls):
        target = tmp_path / f"{call}.db"
        assert killed_at(call, "backup", driver.path, target).returncode == 9
        assert not target.exists()
        assert len(leftovers(tmp_path)) > 0
        backup(driver.path, target)
        assert len(jobs_of(target)) == 300
        assert leftovers(tmp_path) == []


@pytest.mark.slow
def test_a_restore_that_is_killed_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    old, new = tmp_path / "old.db", tmp_path / "new.db"
    for path, count in ((old, 400), (new, 200)):
        made = SQLiteDriver(path)
        enqueue(made, count)
        made.close()
    saved = tmp_path / "saved.db"
    backup(new, saved)
    was, wanted = jobs_of(old), jobs_of(new)
    backup(old, tmp_path / "again.db")
    calls = int(killed_at(0, "restore", saved, tmp_path / "again.db").stdout)
    half = calls // 2
    for call in (1, half - 1, half + 1, half + 2, calls - 1, calls):
        target = tmp_path / f"target{call}.db"
        backup(old, target)
        open_elsewhere = SQLiteDriver(target)
        open_elsewhere.run(ops.clock())
        assert killed_at(call, "restore", saved, target).returncode == 9
        assert jobs_of(target) == (wanted if call == calls else was)
        assert len(open_elsewhere.run(ops.listing(limit=1000))) == (200 if call == calls else 400)
        enqueue(open_elsewhere)
        open_elsewhere.close()
        assert is_whole(target)
        restore(saved, target)
        assert jobs_of(target) == wanted


def test_a_killed_restore_to_a_new_path_leaves_no_file(driver: SQLiteDriver, tmp_path: Path) -> None:
    enqueue(driver, 300)
    backup(driver.path, tmp_path / "saved.db")
    target = tmp_path / "target.db"
    calls = int(killed_at(0, "restore", tmp_path / "saved.db", tmp_path / "first.db").stdout)
    for call in (1, calls // 2, calls):
        assert killed_at(call, "restore", tmp_path / "saved.db", target).returncode == 9
        assert not target.exists()
