"""Where a server runs: Linux on x86-64 or aarch64 with glibc, for which all that it needs has packages."""

from __future__ import annotations

import os
import platform

from loraplex.adapters.errors import LoraplexError

MACHINES = ("x86_64", "aarch64")


class PlatformUnsupported(LoraplexError):
    """No server runs on this machine."""

    code = "platform_unsupported"


def require_supported_platform() -> None:
    """Raises PlatformUnsupported. Called before anything is imported that may be missing elsewhere."""
    system, machine = platform.system(), platform.machine()
    if system != "Linux" or machine not in MACHINES:
        found = f"{'macOS' if system == 'Darwin' else system} on {machine}"
    elif not _has_glibc():
        found = f"Linux on {machine} with another C library"
    else:
        return
    raise PlatformUnsupported(
        f"Linux on x86-64 or aarch64 with glibc is needed, and this is {found}. The commands that administer or ask a "
        "server work here, with --admin-url or --url."
    )


def _has_glibc() -> bool:
    try:
        return bool(os.confstr("CS_GNU_LIBC_VERSION"))
    except (OSError, ValueError):  # musl does not know the name
        return False
