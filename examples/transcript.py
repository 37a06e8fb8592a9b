"""For the `run.py` of each example: its database, processes by their pid, and claims printed with their evidence."""

import argparse
import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Self

from duly import Duly
from duly.errors import DulyError

TAIL = 20  # lines of the log that are printed below a claim that does not hold
over = threading.Event()  # then nothing waits any more


class Transcript:
    """Prints claims, and ends the processes of the run. Make it before the app is imported, which reads `$DULY_URL`."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="duly-example-")
        self._processes: list[subprocess.Popen[bytes]] = []
        self.log = Path(self._folder.name, "run.log")
        parser = argparse.ArgumentParser(description="Run an example, and print what it shows.")
        parser.add_argument("--url", default=os.environ.get("DULY_URL"), help="a database, in place of a new file")
        self.url: str = parser.parse_args().url or f"{self._folder.name}/duly.db"
        os.environ.update(DULY_URL=self.url, DULY_SCHEMA=f"example_{os.getpid()}")  # the schema is for PostgreSQL
        try:
            with closing(Duly(self.url)) as app:
                app.migrate()
        except DulyError as error:
            print(f"the database cannot be used: {' '.join(str(error).split())}", file=sys.stderr)
            sys.exit(2)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        over.set()
        for process in self._processes:
            process.kill()
            process.wait()

    def start(self, *words: str, **environ: str) -> subprocess.Popen[bytes]:
        """Start `python -m …`, with variables added to its environment. What it prints is in the log."""
        if over.is_set():
            raise RuntimeError("the run is over: nothing would end this process")
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", *words]
            self._processes.append(subprocess.Popen(command, env=os.environ | environ, stdout=log, stderr=log))
        return self._processes[-1]

    def claim(self, claim: str, holds: object, evidence: object) -> None:
        """Print a claim with its evidence. If it does not hold, end the run with exit code 1."""
        print(f"{'✔' if holds else '✘'} {claim}: {evidence}", flush=True)
        if not holds:
            sys.exit("\n".join(self.log.read_text("utf-8").splitlines()[-TAIL:]) if self.log.exists() else 1)


def until(done: Callable[[], object], seconds: float = 15) -> bool:
    """Wait until something is true. False: it was not within this time."""
    give_up_at = time.monotonic() + seconds
    while not (is_done := bool(done())) and time.monotonic() < give_up_at and not over.wait(0.1):
        pass
    return is_done


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


async def forward(port: str, host: str, to: str) -> None:
    """Lead a port of this machine to a server: `python -m examples.transcript …`. Killed, it is an outage."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far = await asyncio.open_connection(host, to)
        await asyncio.gather(pump(reader, far[1]), pump(far[0], writer), return_exceptions=True)

    await (await asyncio.start_server(serve, "127.0.0.1", int(port))).serve_forever()


if __name__ == "__main__":
    asyncio.run(forward(*sys.argv[1:]))
