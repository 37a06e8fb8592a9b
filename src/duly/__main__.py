"""`python -m duly` is the command `duly`."""

from __future__ import annotations

from duly.cli import main

main(prog_name="duly")
