"""The folder of a Worker: which files duly writes into it, and its deployment by wrangler."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from pathlib import Path

from duly.errors import ConfigError

HERE = Path(__file__).parent
# These belong to the user: written once.
OURS_ONCE = {"wrangler.jsonc": "wrangler.jsonc", "src/index.mjs": "worker.mjs"}
# These belong to duly: written each time.
GENERATED = ("gateway.mjs", "index.mjs", "statements.mjs")
NO_DATABASE = "00000000-0000-0000-0000-000000000000"
_SEAL = re.compile(r"// sha256 ([0-9a-f]{64})\n\Z")


def write(folder: Path, *, force: bool = False) -> list[str]:
    """Write the files of a Worker and return their names. The user's files are kept if they exist."""
    for other in ("wrangler.json", "wrangler.toml"):
        if (folder / other).exists():
            raise ConfigError(f"{folder / other} is the configuration of another Worker: choose another folder")
    written = {f"duly/{name}": _sealed((HERE / name).read_text("utf-8")) for name in GENERATED}
    for name in written:
        if not force and _is_changed(folder / name):
            raise ConfigError(
                f"{folder / name} was changed by hand, and duly writes it anew: "
                f"move your code to {folder / 'src/index.mjs'}, or overwrite the file with --force"
            )
    written |= {
        name: (HERE / ours).read_text("utf-8") for name, ours in OURS_ONCE.items() if not (folder / name).exists()
    }
    for name, text in written.items():
        _replace(folder / name, text)
    return sorted(written)


def deploy(folder: Path, *, dry_run: bool = False, force: bool = False) -> int:
    """Write the folder's generated files and run its wrangler; returns the exit code of wrangler."""
    config = folder / "wrangler.jsonc"
    if not config.exists():
        raise ConfigError(f"{config} does not exist: run `duly cloudflare init {folder}` first")
    if not dry_run and NO_DATABASE in config.read_text("utf-8"):
        raise ConfigError(
            f"{config} names no database: run `npx wrangler d1 create duly` and write the printed id as database_id"
        )
    command = [_wrangler(folder), "deploy"]
    write(folder, force=force)
    command += ["--dry-run"] if dry_run else []
    return subprocess.run(command, cwd=folder, check=False).returncode  # noqa: S603


def _wrangler(folder: Path) -> str:
    """Find wrangler in the folder, else on the path."""
    found = shutil.which("wrangler", path=folder.resolve() / "node_modules" / ".bin") or shutil.which("wrangler")
    if found is None:
        raise ConfigError(f"wrangler is not installed in {folder}: install Node and run `npm install wrangler` there")
    return found


def _sealed(text: str) -> str:
    """Return a generated file with its checksum at its end, which shows later changes by hand."""
    return f"{text}// sha256 {hashlib.sha256(text.encode()).hexdigest()}\n"


def _is_changed(file: Path) -> bool:
    """Return whether a file exists and is not as any version of duly wrote it."""
    if not file.exists():
        return False
    text = file.read_text("utf-8")
    seal = _SEAL.search(text)
    return seal is None or _sealed(text[: seal.start()]) != text


def _replace(file: Path, text: str) -> None:
    """Write a whole file or nothing: an interrupted write must not look like a change by hand."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f"{file.name}.new")
    new.write_text(text, "utf-8")
    new.replace(file)
