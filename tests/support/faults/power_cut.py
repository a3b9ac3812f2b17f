"""A file system that forgets at a power cut what was not flushed.

The model of a POSIX file system in its worst mood: a file's bytes survive once the file was flushed, a change of a
folder (an entry made, renamed or removed) once that folder was flushed; of all other changes any part may survive,
each by itself. A rename is one change: it is seen at both ends or at neither, and is safe once one of its two folders
was flushed, as journaling file systems have it. A database's commit survives from the moment that it returns.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from loraplex.adapters.store.fault_points import FaultPoint
from support.faults.crash import Point
from support.faults.witness import KINDS

FILES = frozenset({"adapter_config.json", "adapter_model.safetensors"})


@dataclass(eq=False)
class Node:
    """A file, whose bytes are safe or not, or a folder. `count` is how many writes it had."""

    entries: dict[str, Node] | None
    count: int = 0
    safe: int = 0


@dataclass(eq=False)
class Change:
    """To the entries of folders: (folder, name, what is there from now on)."""

    edits: list[tuple[Node, str, Node | None]]

    def touches(self, folders: Container[Node | None]) -> bool:
        return any(folder in folders for folder, _, _ in self.edits)


@dataclass
class Disk:
    """`now` is what the processes see; `safe` folders as they are certain to survive; `pending` what may."""

    root: Node = field(default_factory=lambda: Node({}))
    safe: dict[Node, dict[str, Node]] = field(default_factory=dict)
    pending: list[Change] = field(default_factory=list)

    def find(self, path: str) -> Node | None:
        node: Node | None = self.root
        for part in PurePosixPath(path).parts:
            if node is None or node.entries is None:
                return None
            node = node.entries.get(part)
        return node

    def _place(self, path: str) -> tuple[Node, str]:
        pure = PurePosixPath(path)
        folder = self.find(str(pure.parent)) if pure.parent != PurePosixPath(".") else self.root
        assert folder is not None, path
        return folder, pure.name

    def _change(self, edits: list[tuple[Node, str, Node | None]]) -> None:
        for folder, name, node in edits:
            assert folder.entries is not None
            if node is None:
                folder.entries.pop(name, None)
            else:
                folder.entries[name] = node
        self.pending.append(Change(edits))

    def make(self, path: str, *, folder: bool) -> None:
        self._change([(*self._place(path), Node({} if folder else None))])

    def write(self, path: str) -> None:
        node = self.find(path)
        assert node is not None
        node.count += 1

    def rename(self, path: str, to: str) -> None:
        node, taken = self.find(path), self.find(to)
        assert node is not None
        if (
            taken is None or not taken.entries
        ):  # else it is refused: a folder is only renamed onto an empty one
            self._change([(*self._place(path), None), (*self._place(to), node)])

    def remove(self, path: str) -> None:
        if self.find(path) is not None:
            self._change([(*self._place(path), None)])

    def flush(self, path: str) -> None:
        node = self.find(path) if path != "." else self.root
        assert node is not None
        node.safe = node.count
        if node.entries is None:
            return
        done = [change for change in self.pending if change.touches((node,))]
        self.pending = [change for change in self.pending if not change.touches((node,))]
        _apply(self.safe, done)

    def after_a_cut(self, changes: Iterable[Change]) -> dict[Node, dict[str, Node]]:
        """The folders where of all that is pending only `changes` survive."""
        folders = {node: dict(entries) for node, entries in self.safe.items()}
        _apply(folders, changes)
        return folders


def _apply(folders: dict[Node, dict[str, Node]], changes: Iterable[Change]) -> None:
    for change in changes:
        for folder, name, node in change.edits:
            entries = folders.setdefault(folder, {})
            if node is None:
                entries.pop(name, None)
            else:
                entries[name] = node


@dataclass(frozen=True)
class Loss:
    """After this many steps a power cut may cost this digest, whose version is in the database."""

    index: int
    step: FaultPoint
    digest: str


def losses(points: list[Point], root: str, *, deaf_to: frozenset[FaultPoint] = frozenset()) -> Iterator[Loss]:
    """Every way in which a power cut during these steps loses a version's bytes; flushes in `deaf_to` do nothing. The
    data directory that holds `root` is there, and safe."""
    base = PurePosixPath(root).parent
    disk = Disk()
    promised: list[str] = []
    published = ""

    def below(path: str | None) -> str:
        return str(PurePosixPath(path or "").relative_to(base))

    for index, point in enumerate(points):
        step = point.step
        if step in KINDS["mkdir"]:
            disk.make(below(point.path), folder=True)
        elif step in KINDS["create"]:
            disk.make(below(point.path), folder=False)
        elif step in KINDS["write"]:
            disk.write(below(point.path))
        elif step in KINDS["fsync"]:
            if step not in deaf_to:
                disk.flush(below(point.path))
        elif step in KINDS["rename"]:
            if step is FaultPoint.PUBLISH:
                published = PurePosixPath(point.to or "").name
            disk.rename(below(point.path), below(point.to))
        elif step in KINDS["remove"]:
            disk.remove(below(point.path))
        elif step is FaultPoint.VERSION_COMMITTED:
            promised.append(published)
        elif step is FaultPoint.REMOVAL_COMMITTED:
            going = {PurePosixPath(p.path or "").name for p in _removals(points[index + 1 :])}
            promised = [digest for digest in promised if digest not in going]
        for digest in promised:
            if not _survives(disk, digest):
                yield Loss(index, step, digest)


def _removals(points: list[Point]) -> list[Point]:
    """The retirements that belong to the removal just before these."""
    return [
        point
        for point in itertools.takewhile(lambda p: p.step in _REMOVING, points)
        if point.step is FaultPoint.RETIRE
    ]


_REMOVING = frozenset({FaultPoint.RETIRE, FaultPoint.FLUSH_RETIRED, FaultPoint.PURGE})


def _survives(disk: Disk, digest: str) -> bool:
    """Whatever part of what is pending on the way to it survives a cut."""
    way = {
        disk.find(path)
        for path in (
            ".",
            "artifacts",
            "artifacts/sha256",
            f"artifacts/sha256/{digest[:2]}",
            _place_of(digest),
        )
    }
    pending = [change for change in disk.pending if change.touches(way)]
    for number in range(len(pending) + 1):
        for changes in itertools.combinations(pending, number):
            if not _is_whole(disk, disk.after_a_cut(changes), digest):
                return False
    return True


def _place_of(digest: str) -> str:
    return f"artifacts/sha256/{digest[:2]}/{digest}"


def _is_whole(disk: Disk, folders: dict[Node, dict[str, Node]], digest: str) -> bool:
    node: Node | None = disk.root
    for part in ("artifacts", "sha256", digest[:2], digest):
        node = folders.get(node, {}).get(part) if node is not None else None
    if node is None:
        return False
    entries = folders.get(node, {})
    return set(entries) == FILES and all(file.count == file.safe for file in entries.values())
