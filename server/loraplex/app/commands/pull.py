"""`loraplex adapter pull`: a version's files into a directory."""

from __future__ import annotations

import contextlib
import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, cast

import typer

from loraplex.adapters.admission.chat_files import OwnChat, read_chat_files
from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.store.files import (
    CHAT_FILE_BYTES,
    CHUNK_BYTES,
    CONFIG_NAME,
    TENSORS_NAME,
    create_file,
    digest_upload,
    write_all,
)
from loraplex.app.commands.shared.client import AdminClient
from loraplex.app.commands.shared.errors import CommandFailed
from loraplex.app.commands.shared.options import TenantOption, split_version
from loraplex.app.commands.shared.paths import segment
from loraplex.app.output import Output, size
from loraplex.app.transfer_bar import transfer_bar

if TYPE_CHECKING:
    import httpx

FILES = (CONFIG_NAME, TENSORS_NAME)


def pull(
    admin: AdminClient,
    out: Output,
    adapter: Annotated[
        str,
        typer.Argument(
            metavar="NAME[@VERSION]",
            help="Such as support or support@v2; without a version, the one that takes most traffic",
            show_default=False,
        ),
    ],
    directory: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Where its files go; made if need be", show_default=False),
    ],
    tenant: TenantOption,
    force: Annotated[
        bool, typer.Option("--force", help="Replace other files of the same names in DIR")
    ] = False,
) -> None:
    name, given = split_version(adapter)
    path = f"/tenants/{segment(tenant)}/adapters/{segment(name)}"
    version, why = (given, "") if given is not None else _most_traffic(admin, path)
    found = admin.call("GET", f"{path}/versions/{segment(version)}")
    is_there = _check_directory(directory, found["digest"], found["serving"]["chat_digest"], force=force)
    if not is_there:
        _fetch(admin, path, found, directory, is_quiet=out.as_json)
    if out.as_json:
        shown = {key: found[key] for key in ("name", "version", "digest", "bytes")}
        out.json(shown | {"directory": str(directory), "fetched": not is_there})
        return
    what = f"{name}@{version}{why}"
    if is_there:
        out.line(f"{what}: its files are in {directory} already")
    else:
        out.line(f"{what}: {size(found['bytes'])} in {directory}")


def _most_traffic(admin: AdminClient, path: str) -> tuple[str, str]:
    """The version with the largest share, of several the newest; and the words for it."""
    targets = admin.call("GET", f"{path}/release")["targets"]
    chosen = max(targets, key=lambda target: (target["weight"], int(target["version"][1:])))
    share = 100 * chosen["weight"] / (sum(target["weight"] for target in targets) or 1)
    return chosen["version"], f" (takes {share:.3g}% of the traffic)"


def _check_directory(directory: Path, digest: str, chat_digest: str | None, *, force: bool) -> bool:
    """Whether the files are there already. Raises CommandFailed for others in their place, unless `force`."""
    names = FILES if chat_digest is None else (*FILES, *CHAT_FILE_BYTES)
    try:
        present = [file for file in (directory / name for name in names) if os.path.lexists(file)]
        with contextlib.suppress(OSError):  # a folder or a link in its place
            has_both = set(present).issuperset(directory / name for name in FILES)
            if has_both and _digests(directory, with_chat=chat_digest is not None) == (digest, chat_digest):
                return True
    except OSError as error:
        raise CommandFailed(f"{directory}: {error.strerror}.") from error
    if present and not force:
        raise CommandFailed(
            f"{present[0]} is there already, and is not that of this version. Give another DIR, or --force to replace "
            "it."
        )
    return False


def _digests(directory: Path, *, with_chat: bool) -> tuple[str, str | None]:
    """Digests of an adapter's files and of its chat files. Raises OSError."""
    files = None
    if with_chat:
        with contextlib.suppress(AdapterRefused):  # they are others
            files = read_chat_files(directory)
    chat = None if files is None else OwnChat(files.templates, files.special_tokens, files.eos_ids).digest
    return digest_upload(*(directory / name for name in FILES)), chat


def _fetch(admin: AdminClient, path: str, found: dict[str, Any], directory: Path, *, is_quiet: bool) -> None:
    """The files beside their places first, and into them once their digests are right."""
    is_new = not directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".pull-", dir=directory))
    except OSError as error:
        raise CommandFailed(f"{directory}: {error.strerror}.") from error
    try:
        _receive(admin, f"{path}/versions/{segment(found['version'])}", scratch, is_quiet=is_quiet)
        chat_digest = found["serving"]["chat_digest"]
        if _digests(scratch, with_chat=chat_digest is not None) != (found["digest"], chat_digest):
            raise CommandFailed(
                f"what came from {admin.url} is not {found['name']}@{found['version']}: its digest is another; try "
                "again."
            )
        others = [name for name in CHAT_FILE_BYTES if (scratch / name).exists()]
        for name in (*others, *reversed(FILES)):
            os.replace(scratch / name, directory / name)
    except OSError as error:
        raise CommandFailed(
            f"{error.filename or directory}: {error.strerror}. Nothing was replaced."
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if is_new:
            with contextlib.suppress(OSError):  # it is not empty
                directory.rmdir()


def _receive(admin: AdminClient, version_path: str, scratch: Path, *, is_quiet: bool) -> None:
    """Raises CommandFailed; it says so where the server's own bytes are damaged, which shows as a cut answer."""
    try:
        with contextlib.ExitStack() as stack:
            response = stack.enter_context(admin.stream(f"{version_path}/archive"))
            total = int(response.headers.get("content-length", 0))
            bar = transfer_bar(total, "downloading", "downloaded", is_quiet=is_quiet)
            _extract(_Reader(response, stack.enter_context(bar)), scratch)
    except CommandFailed as failure:
        state = "ready"
        with contextlib.suppress(CommandFailed):
            state = admin.call("GET", version_path)["state"]
        if failure.body is not None or state == "ready":
            raise
        raise CommandFailed(f"{failure.message} The version is {state} now.") from failure


def _extract(reader: _Reader, scratch: Path) -> None:
    missing, others = set(FILES), set(CHAT_FILE_BYTES)
    try:
        with tarfile.open(fileobj=cast(IO[bytes], reader), mode="r|") as tar:
            for member in tar:
                is_known = member.name in missing or (
                    member.name in others and member.size <= CHAT_FILE_BYTES[member.name]
                )
                content = tar.extractfile(member) if member.isreg() and is_known else None
                if content is None:
                    raise CommandFailed(
                        f"the archive holds '{member.name[:80]}'; is this Loraplex's admin plane?"
                    )
                missing.discard(member.name)
                others.discard(member.name)
                with create_file(scratch / member.name) as file:
                    while data := content.read(CHUNK_BYTES):
                        write_all(file, data)
                    os.fchmod(file.fileno(), 0o666 & ~_umask())
                    os.fsync(file.fileno())
    except tarfile.TarError as error:
        raise CommandFailed(f"the archive cannot be read: {error}.") from error
    reader.finish()
    if missing:
        raise CommandFailed(f"the archive lacks {', '.join(sorted(missing))}.")


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


class _Reader:
    """An answer's body as a file for `tarfile`; `note` is called with the bytes of each piece."""

    def __init__(self, response: httpx.Response, note: Callable[[int], None] | None) -> None:
        self._pieces = response.iter_raw(CHUNK_BYTES)
        self._rest = b""
        self._note = note

    def read(self, num_bytes: int) -> bytes:
        while len(self._rest) < num_bytes:
            piece = next(self._pieces, b"")
            if not piece:
                break
            if self._note is not None:
                self._note(len(piece))
            self._rest += piece
        data, self._rest = self._rest[:num_bytes], self._rest[num_bytes:]
        return data

    def finish(self) -> None:
        """Read to the end: only then it is known that the answer was whole."""
        for _ in self._pieces:
            pass
