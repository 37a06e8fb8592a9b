"""The folder of a Worker, and `duly cloudflare`."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from duly import Duly
from duly.cli import main
from duly.cloudflare import project, statements
from duly.errors import ConfigError
from duly.store import ops
from duly.store.d1 import catalogue
from duly.store.sqlite.driver import SQLiteDriver
from tests.edges.programs import complaint, say
from tests.servers import workerd
from tests.servers.workerd import Workerd

ID = "8d1c1f0e-1111-4222-8333-944455556666"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a Worker as `init` writes it, with the id of a database."""
    made = tmp_path / "my worker"
    project.write(made)
    config = made / "wrangler.jsonc"
    config.write_text(config.read_text("utf-8").replace(project.NO_DATABASE, ID), "utf-8")
    return made


def duly(*words: object, **environ: str) -> Result:
    return CliRunner().invoke(
        main, ["cloudflare", *map(str, words)], env={"DULY_URL": None, "DULY_APP": None, **environ}
    )


def test_c01_the_worker_has_the_statements_of_the_package() -> None:
    same = statements.FILE.read_text("utf-8") == statements.module()
    assert same, "the SQL has changed: run `.venv/bin/python -m duly.cloudflare.statements` and commit statements.mjs"


def test_c01_a_migration_fits_into_a_request_of_the_free_plan() -> None:
    assert max(map(len, catalogue.migrations().values())) <= 49  # of 50, beside a deadline


def test_init_writes_a_worker_and_prints_what_to_run(tmp_path: Path) -> None:
    done = duly("init", tmp_path / "worker")
    assert done.exit_code == 0
    files = {str(file.relative_to(tmp_path / "worker")) for file in tmp_path.rglob("*.*") if file.is_file()}
    assert files == {"wrangler.jsonc", "src/index.mjs", "duly/gateway.mjs", "duly/index.mjs", "duly/statements.mjs"}
    for part in (f"in {tmp_path / 'worker'}:", "wrangler d1 create duly", "duly cloudflare deploy", "duly migrate"):
        assert part in done.stdout


def test_init_keeps_the_files_of_the_user_and_updates_its_own(folder: Path) -> None:
    (folder / "src/index.mjs").write_text("// mine", "utf-8")
    generated = folder / "duly/index.mjs"
    now = generated.read_text("utf-8")
    generated.write_text(project._sealed("// an older version\n"), "utf-8")
    assert duly("init", folder).exit_code == 0
    assert (folder / "src/index.mjs").read_text("utf-8") == "// mine"
    assert ID in (folder / "wrangler.jsonc").read_text("utf-8")
    assert generated.read_text("utf-8") == now


def test_init_refuses_the_folder_of_another_worker(tmp_path: Path) -> None:
    (tmp_path / "wrangler.toml").write_text('name = "shop"', "utf-8")
    refused = duly("init", tmp_path)
    assert (refused.exit_code, "wrangler.toml" in refused.stderr) == (2, True)
    assert [file.name for file in tmp_path.iterdir()] == ["wrangler.toml"]


@pytest.mark.parametrize("command", ["init", "deploy"])
def test_a_generated_file_that_was_changed_is_kept_without_force(folder: Path, command: str) -> None:
    fake_wrangler(folder, "true")
    changed, other = folder / "duly/index.mjs", folder / "duly/gateway.mjs"
    text = changed.read_text("utf-8")
    changed.write_text(text.replace("fetch", "fetched"), "utf-8")
    other.unlink()
    refused = duly(command, folder)
    assert refused.exit_code == 2
    assert str(changed) in refused.stderr
    assert "--force" in refused.stderr
    assert not other.exists()
    assert duly(command, folder, "--force").exit_code == 0
    assert changed.read_text("utf-8") == text


def fake_wrangler(folder: Path, script: str) -> None:
    file = folder / "node_modules/.bin/wrangler"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{script}\n", "utf-8")
    file.chmod(0o755)


@pytest.mark.parametrize(("words", "asked"), [((), "deploy"), (("--dry-run",), "deploy --dry-run")])
def test_deploy_runs_the_wrangler_of_the_folder_with_the_files_of_this_version(
    folder: Path, words: tuple[str, ...], asked: str
) -> None:
    fake_wrangler(folder, 'echo "$@" > asked; cp duly/index.mjs seen.mjs; exit 7')
    generated = folder / "duly/index.mjs"
    now = generated.read_text("utf-8")
    generated.write_text(project._sealed("// an older version\n"), "utf-8")
    assert duly("deploy", folder, *words).exit_code == 7
    assert (folder / "asked").read_text("utf-8") == f"{asked}\n"
    assert (folder / "seen.mjs").read_text("utf-8") == now


def test_deploy_names_what_is_missing(folder: Path, tmp_path: Path) -> None:
    empty = duly("deploy", tmp_path / "none")
    assert (empty.exit_code, "duly cloudflare init" in empty.stderr) == (2, True)
    no_wrangler = duly("deploy", folder, PATH=str(tmp_path))
    assert (no_wrangler.exit_code, "npm install wrangler" in no_wrangler.stderr) == (2, True)
    fake_wrangler(folder, "touch ran")
    config = folder / "wrangler.jsonc"
    config.write_text(config.read_text("utf-8").replace(ID, project.NO_DATABASE), "utf-8")
    no_database = duly("deploy", folder)
    assert (no_database.exit_code, "wrangler d1 create duly" in no_database.stderr) == (2, True)
    assert not (folder / "ran").exists()
    assert duly("deploy", folder, "--dry-run").exit_code == 0


def test_j02_a_connection_is_refused_by_an_app_on_d1(tmp_path: Path) -> None:
    """Its jobs would stand in a database that no worker of the app reads."""
    app = Duly("d1://token@127.0.0.1:9/duly")

    @app.task
    def work() -> None: ...

    Duly(tmp_path / "jobs.db").migrate()
    with closing(sqlite3.connect(tmp_path / "jobs.db")) as conn:
        for call in (lambda: work.using(conn=conn).enqueue(), lambda: app.batch("b", conn=conn).__enter__()):
            with pytest.raises(ConfigError, match="D1 has none"):
                call()
        with pytest.raises(ConfigError, match="D1 has none"):
            asyncio.run(work.using(conn=conn).aenqueue())
        assert conn.execute("select count(*) from duly_job").fetchone() == (0,)
    app.close()


def test_check_is_for_d1(tmp_path: Path) -> None:
    SQLiteDriver(tmp_path / "jobs.db").run(ops.clock())
    refused = duly("check", "--url", tmp_path / "jobs.db")
    assert (refused.exit_code, "duly doctor" in refused.stderr) == (2, True)


def needs_runtime(test: Any) -> Any:
    marks = pytest.mark.cloudflare, pytest.mark.skipif(workerd.why_not() is not None, reason=workerd.why_not() or "")
    return marks[0](marks[1](test))


@pytest.mark.slow
@pytest.mark.process
@needs_runtime
def test_c06_wrangler_accepts_what_init_writes(folder: Path) -> None:
    quiet = {"HOME": str(folder), "WRANGLER_SEND_METRICS": "false", "CI": "true", "NO_COLOR": "1"}
    fake_wrangler(folder, f'exec "{workerd.FOLDER / "node_modules/.bin/wrangler"}" "$@"')
    command = [sys.executable, "-m", "duly", "cloudflare", "deploy", str(folder), "--dry-run"]
    run = subprocess.run(command, env={**os.environ, **quiet}, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "env.DB (duly)" in run.stdout
    assert "env.DB_ID" in run.stdout
    assert "[WARNING]" not in run.stdout + run.stderr


TASKS = """
from duly import Duly

app = Duly()

@app.task
def add(a: int, b: int) -> int:
    return a + b
"""


@pytest.mark.slow
@needs_runtime
def test_c06_the_steps_of_the_page_run_a_job_on_d1(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(TASKS, "utf-8")
    with Workerd(ALLOW_SQL="") as runtime:

        def run(*words: str, token: str = runtime.token) -> subprocess.CompletedProcess[str]:
            url = f"d1://env:DULY_D1_TOKEN@{runtime.host}:{runtime.port}/duly"
            return say(tmp_path, *words, DULY_URL=url, DULY_D1_TOKEN=token)

        assert "duly migrate" in complaint(run("cloudflare", "check"), 1)
        assert "API_TOKEN" in complaint(run("cloudflare", "check", token="another"), 2)
        assert "applied 0001_first" in run("migrate").stdout
        assert "up to date" in run("migrate").stdout
        checked = run("cloudflare", "check")
        assert (checked.returncode, "round trip" in checked.stdout) == (0, True)
        job_id = run("enqueue", "tasks:app", "add", "[1, 2]").stdout.strip()
        assert "ran 1" in run("tick", "tasks:app").stdout
        job = json.loads(run("jobs", "show", job_id, "--json").stdout)
        assert (job["state"], job["result"]) == ("succeeded", 3)
