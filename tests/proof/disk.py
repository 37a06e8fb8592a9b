"""A disk made of what was asked of it: what it holds after each write and sync, and what a crash may leave of that.

What is not modelled: the index of the WAL in shared memory, which the first to open the file after a crash builds anew,
and disks that lie, where even what was synced may be gone.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

SECTOR = 512


class Event(NamedTuple):
    """One thing that was asked of the disk."""

    what: str  # "write", "truncate", "sync" or "delete"
    file: str
    at: int = 0  # where it writes, or how long the file is afterwards
    data: bytes = b""


class File:
    """One file: what is on the disk for sure, and what was asked since."""

    def __init__(self) -> None:
        self.now = bytearray()
        self.synced = bytearray()
        self.exists_for_sure = False
        self.since: list[Event] = []

    def take(self, event: Event) -> None:
        """Have one more thing happen."""
        if event.what == "sync":
            self.synced, self.since, self.exists_for_sure = bytearray(self.now), [], True
        else:
            _change(self.now, event)
            self.since.append(event)

    def after_power_cut(self, chance: random.Random) -> bytearray:
        """Make what may be on the disk: each sector as it was synced, or as it was at some moment since."""
        content = bytearray(self.synced)
        pieces = [piece for event in self.since for piece in _pieces(event)]
        arrived = _arrived(pieces, chance)
        for piece in pieces:
            sector = piece.at // SECTOR
            if piece.what == "truncate":
                if chance.random() < 0.5:
                    _change(content, piece)
            elif arrived[sector] > 0:
                arrived[sector] -= 1
                _change(content, piece)
        return content


def _pieces(event: Event) -> list[Event]:
    """Cut a write at the borders of sectors."""
    if event.what != "write":
        return [event]
    borders = [event.at, *range((event.at // SECTOR + 1) * SECTOR, event.at + len(event.data), SECTOR)]
    ends = [*borders[1:], event.at + len(event.data)]
    return [
        Event("write", event.file, begin, event.data[begin - event.at : end - event.at])
        for begin, end in zip(borders, ends, strict=True)
    ]


def _arrived(pieces: list[Event], chance: random.Random) -> dict[int, int]:
    """Choose how many of the writes to each sector reached the disk: for about half of the sectors none."""
    asked: dict[int, int] = {}
    for piece in pieces:
        if piece.what == "write":
            asked[piece.at // SECTOR] = asked.get(piece.at // SECTOR, 0) + 1
    return {
        sector: 0 if chance.random() < 0.5 else count if chance.random() < 0.75 else chance.randint(1, count)
        for sector, count in asked.items()
    }


def _change(content: bytearray, event: Event) -> None:
    if event.what == "truncate":
        del content[event.at :]
    if len(content) < event.at:
        content.extend(bytes(event.at - len(content)))
    if event.what == "write":
        content[event.at : event.at + len(event.data)] = event.data


class Disk:
    """The files as the events so far have left them."""

    def __init__(self) -> None:
        self._files: dict[str, File] = {}
        self._maybe_back: dict[str, File] = {}  # deleted, and the folder was not synced since

    def take(self, event: Event) -> None:
        """Have one more thing happen."""
        if event.what == "delete":
            file = self._files.pop(event.file, None)
            if file is not None and not event.at:
                self._maybe_back[event.file] = file
            return
        file = self._files.setdefault(event.file, File())
        if event.what == "sync" and not file.exists_for_sure:
            self._maybe_back.clear()  # the first sync of a new file syncs its folder
        file.take(event)

    @property
    def in_doubt(self) -> bool:
        """Whether a power cut could leave something else than a kill."""
        return bool(self._maybe_back) or any(file.since for file in self._files.values())

    def after_kill(self) -> dict[str, bytes]:
        """Give what is there when only the process has gone: the system still writes all that it was given."""
        return {name: bytes(file.now) for name, file in self._files.items()}

    def after_power_cut(self, chance: random.Random) -> dict[str, bytes]:
        """Give what may be there when the power went: what was synced, and about half of the sectors written since."""
        files = {name: file for name, file in self._maybe_back.items() if chance.random() < 0.5} | {
            name: file for name, file in self._files.items() if file.exists_for_sure or chance.random() < 0.5
        }
        return {name: bytes(file.after_power_cut(chance)) for name, file in files.items()}


def lay_down(files: dict[str, bytes], folder: Path) -> None:
    """Put files into a folder, and nothing else."""
    for path in folder.iterdir():
        if path.name not in files:
            path.unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)
