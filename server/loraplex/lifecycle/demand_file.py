"""The recorded demand for adapters, in one small file of the data directory.

It says only in which order versions are loaded again. What it names is looked up in the catalog, so nothing in it is
believed; a file that cannot be read counts as none.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from loraplex.adapters.errors import LoraplexError
from loraplex.adapters.store.files import create_file, open_regular, write_all
from loraplex.serving.demand import MAX_RANKED, MAX_USES, Uses, decay

FILE_NAME = "adapter-demand.json"
MAX_BYTES = 1 << 20
"""4,096 versions take 640 KiB at most."""
_Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
_TenantId = Annotated[str, msgspec.Meta(max_length=63)]
_Count = Annotated[float, msgspec.Meta(ge=0, le=MAX_USES)]


class DemandUnreadable(LoraplexError):
    """The file is damaged, or not one that a server wrote."""

    code = "demand_unreadable"


@dataclass(frozen=True, slots=True)
class Recorded:
    """The uses of a digest, decayed to now, and the tenant whose version was used last."""

    digest: str
    tenant_id: str
    uses: float


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    """`saved_at` in seconds since the epoch; `uses` as of then, the most used first: digest, tenant, uses."""

    format: Literal[1]
    saved_at: float
    uses: Annotated[list[tuple[_Digest, _TenantId, _Count]], msgspec.Meta(max_length=MAX_RANKED)]


_decoder = msgspec.json.Decoder(_Document)


def write_demand(folder: Path, ranked: Sequence[Uses]) -> None:
    """Replace the file at once and whole; a crash leaves the old one or the new one. Raises OSError."""
    uses = [(each.ref.digest, each.ref.tenant_id, round(each.uses, 3)) for each in ranked]
    raw = msgspec.json.encode(_Document(1, time.time(), uses))
    scratch = folder / f"{FILE_NAME}.new"
    with contextlib.suppress(FileNotFoundError):  # what a crash left
        scratch.unlink()
    try:
        with create_file(scratch) as file:
            write_all(file, raw)
            os.fsync(file.fileno())
        os.replace(scratch, folder / FILE_NAME)
    except OSError:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)
        raise


def read_demand(folder: Path) -> list[Recorded]:
    """The most used first; empty where there is no file. Raises DemandUnreadable."""
    try:
        with open_regular(folder / FILE_NAME) as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise DemandUnreadable(f"{FILE_NAME} is larger than {MAX_BYTES} bytes")
        document = _decoder.decode(raw)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DemandUnreadable(f"{FILE_NAME} cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DemandUnreadable(f"{FILE_NAME} is damaged: {error}") from error
    left = decay(time.time() - document.saved_at)
    found = {digest: Recorded(digest, tenant, uses * left) for digest, tenant, uses in document.uses}
    return sorted(found.values(), key=lambda each: each.uses, reverse=True)
