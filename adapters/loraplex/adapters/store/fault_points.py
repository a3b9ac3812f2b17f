"""Every step by which an upload, a deletion or a sweep changes the disk or the database.

Code that takes a step announces it first, to the `Fault` that the store was made with: a test's one raises what a
broken disk would, or ends the process. `ArtifactStore` passes it to all code that works in its folders; outside of
tests it does nothing.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Protocol


class FaultPoint(StrEnum):
    """In the order of an upload, then of removals. Most changes are made right after they are announced; the three
    `…_COMMITTED` are announced after theirs, before the result is returned."""

    MAKE_STORE = "make store"  # mkdir of the store's own folders
    FLUSH_STORE = "flush store"  # fsync of the folders that hold them

    STAGE = "stage"  # mkdir of a staging folder
    RECEIVE_CREATE = "receive: create"
    RECEIVE_WRITE = "receive: write"
    UNPACK_CREATE = "unpack: create"  # of an archive's member, or of a file that is converted
    UNPACK_WRITE = "unpack: write"
    FLUSH_STAGED = "flush staged"  # fsync of each file, before any lock is taken
    DROP_LEFTOVER = "drop leftover"  # unlink of what is not kept, such as the archive
    FLUSH_FILE = "flush file"
    FLUSH_FOLDER = "flush folder"
    MAKE_SHELF = "make shelf"  # mkdir
    FLUSH_SHELVES = "flush shelves"
    PUBLISH = "publish"  # rename
    FLUSH_SHELF = "flush shelf"
    BUCKET_PUT = "bucket: put"  # each of the two objects, the tensors first
    BUCKET_STORED = "bucket: stored"  # after the second one
    COMMIT_VERSION = "commit version"
    VERSION_COMMITTED = "version committed"

    COMMIT_DURABLE = "commit durable"  # of versions that served before their bytes were flushed
    COMMIT_CHECK = "commit check"  # of a version's numbers
    CHECK_COMMITTED = "check committed"

    COMMIT_REMOVAL = "commit removal"
    REMOVAL_COMMITTED = "removal committed"
    BUCKET_DELETE = "bucket: delete"  # each of the two objects, the config first
    RETIRE = "retire"  # rename out of the shelf
    FLUSH_RETIRED = "flush retired"
    PURGE = "purge"  # unlink and rmdir of what was retired
    DISCARD = "discard"  # unlink and rmdir of a staging folder
    SWEEP = "sweep"
    MARK_CORRUPT = "mark corrupt"  # commit
    COMMIT_LOST = "commit lost"  # at a start, of versions whose bytes a crash cost before they were flushed


BUCKET_POINTS = frozenset({FaultPoint.BUCKET_PUT, FaultPoint.BUCKET_STORED, FaultPoint.BUCKET_DELETE})
"""Steps of the store in a bucket alone; it takes the others in its cache."""


class Fault(Protocol):
    """Called before each step, with what it changes (and, for a rename, what that becomes). What it raises is raised
    in place of the step."""

    def __call__(self, step: FaultPoint, path: Path | None = None, to: Path | None = None, /) -> None: ...


def no_fault(step: FaultPoint, path: Path | None = None, to: Path | None = None, /) -> None:
    """The real world is faulty enough."""
