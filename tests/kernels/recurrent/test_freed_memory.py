"""Numba frees an array behind its last use by name, also where a kernel still has its address."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).with_name("test_recurrent.py")


def test_no_kernel_reads_what_numba_has_freed() -> None:
    """The C library fills freed memory with 0x7f: 3.4e38 as float32."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-m",
        "not soak",
        "-k",
        "numba",
    ]
    ran = subprocess.run(
        [*command, str(TESTS)],
        env=os.environ | {"MALLOC_PERTURB_": "127"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-4000:]
