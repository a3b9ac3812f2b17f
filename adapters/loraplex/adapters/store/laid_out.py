"""Deletion of the laid-out adapters that an engine keeps on the disk, by the process that deletes their uploads.

`adapters.device.image_files` writes and reads them as ROOT/<key>/<digest>; it needs torch.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path


def remove_laid_out(root: Path, digest: str) -> None:
    """Delete what was made of one upload, by any layout and for any base. Raises OSError."""
    for path in root.glob(f"*/{digest}"):
        path.unlink(missing_ok=True)


def keep_laid_out(root: Path, digests: Collection[str]) -> None:
    """Delete what was made of any other upload. Files that are being written stay. Raises OSError."""
    for path in root.glob("*/*"):
        if path.name not in digests and not path.name.startswith("."):
            path.unlink(missing_ok=True)
