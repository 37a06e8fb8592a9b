"""The folder of a Worker, and `duly cloudflare`."""

from __future__ import annotations

from duly.cloudflare import statements


def test_c01_the_worker_has_the_statements_of_the_package() -> None:
    same = statements.FILE.read_text("utf-8") == statements.module()
    assert same, "the SQL has changed: run `.venv/bin/python -m duly.cloudflare.statements` and commit statements.mjs"
