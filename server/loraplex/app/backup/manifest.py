"""The manifest of a backup: what is in it, with the digest of each file and of itself."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from loraplex.adapters.store.files import CHUNK_BYTES, create_file, open_regular, write_all
from loraplex.app.backup.errors import BackupRefused

FORMAT = 2
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 256 << 20
SQLITE_FILE, POSTGRES_FILE = "loraplex.db", "loraplex.dump"
PEPPER, TOKEN = "key-pepper", "admin-token"
_OWN_NAME = re.compile(
    rf"{re.escape(SQLITE_FILE)}|{re.escape(POSTGRES_FILE)}|{PEPPER}|{TOKEN}|usage/[0-9A-Za-z_-]{{1,64}}/\d{{10}}\.segment"
)

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Size = Annotated[int, Field(ge=0, le=1 << 60)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class AuditHead(_Part):
    """The length of the audit log, and the hash of its last row."""

    seq: Size
    hash: Annotated[str, Field(max_length=64)]


class DatabasePart(_Part):
    """`file` None: it could not be copied."""

    server: Annotated[str, Field(max_length=200)]
    schema_: Annotated[str, Field(alias="schema", max_length=32)]
    file: Literal["loraplex.db", "loraplex.dump"] | None
    audit: AuditHead | None
    pepper_mark: Annotated[str, Field(max_length=64)] | None


class ArtifactsPart(_Part):
    """`digests` are those that are in the backup. `corrupt` and `damaged` are not; the server knew of the former."""

    count: Size
    bytes: Size
    digests: list[Sha256]
    corrupt: list[Sha256]
    damaged: list[Sha256]


class FilePart(_Part):
    bytes: Size
    sha256: Sha256


class Manifest(_Part):
    """`files` are all files of the backup except the artifacts and the manifest, by their path within it. `secrets`
    says where each secret is: its file's name, the option that gave it, or None."""

    format: Literal[2]
    loraplex: Annotated[str, Field(max_length=64)]
    made_at: Annotated[str, Field(max_length=40)]
    database: DatabasePart
    artifacts: ArtifactsPart
    secrets: dict[str, str | None]
    files: dict[str, FilePart]
    sha256: Sha256
    """The digest of the rest of the manifest; it names this backup."""


def write_manifest(directory: Path, content: dict[str, Any]) -> dict[str, Any]:
    """`content` without its `sha256`; with it. It is on the disk when this returns. Raises OSError."""
    whole = content | {"sha256": _digest_of(content)}
    with create_file(directory / MANIFEST) as file:
        write_all(file, json.dumps(whole, indent=2).encode() + b"\n")
        os.fsync(file.fileno())
    return whole


def read_manifest(directory: Path) -> Manifest:
    """The manifest, once it has proved to be whole and to name nothing outside of the backup. Raises BackupRefused."""
    if not directory.is_dir():
        raise BackupRefused(f"there is no directory {directory}.")
    try:
        with open_regular(directory / MANIFEST) as file:
            data = file.read(MAX_MANIFEST_BYTES + 1)
    except FileNotFoundError as error:
        raise BackupRefused(
            f"{directory} is no backup, or one that was cut short: it has no {MANIFEST}, which is written last."
        ) from error
    except OSError as error:
        raise BackupRefused(f"{directory / MANIFEST} cannot be read: {error.strerror}.") from error
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BackupRefused(f"{directory / MANIFEST} is damaged: it is no JSON.") from error
    if isinstance(found, dict) and found.get("format") != FORMAT:
        raise BackupRefused(
            f"{directory / MANIFEST} has the format '{str(found.get('format'))[:20]}', and this version reads "
            f"{FORMAT}: restore it with the version of Loraplex that made it."
        )
    try:
        manifest = Manifest.model_validate_json(data)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part)[:80] for part in problem["loc"]) or "the manifest"
        raise BackupRefused(f"{directory / MANIFEST} is no manifest: {where}: {problem['msg']}.") from error
    if _digest_of({name: value for name, value in found.items() if name != "sha256"}) != manifest.sha256:
        raise BackupRefused(f"{directory / MANIFEST} was altered: its own digest does not match.")
    for name in manifest.files:
        if not _OWN_NAME.fullmatch(name):
            raise BackupRefused(f"{directory / MANIFEST} names the file '{name[:80]}', which no backup has.")
    if manifest.database.file is not None and manifest.database.file not in manifest.files:
        raise BackupRefused(f"{directory / MANIFEST} names no digest for {manifest.database.file}.")
    return manifest


def describe_file(file: BinaryIO) -> dict[str, Any]:
    """Its FilePart. Raises OSError."""
    sha, size = hashlib.sha256(), 0
    while data := file.read(CHUNK_BYTES):
        sha.update(data)
        size += len(data)
    return {"bytes": size, "sha256": sha.hexdigest()}


def open_within(directory: Path, name: str) -> BinaryIO:
    """A regular file of the backup, reached through real folders only: a link could lead outside. Raises OSError."""
    path = directory
    for part in name.split("/")[:-1]:
        path = path / part
        if not stat.S_ISDIR(path.lstat().st_mode):
            raise NotADirectoryError(20, "not a directory, but a link or a file", str(path))
    return open_regular(path / name.rpartition("/")[2])


def _digest_of(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
