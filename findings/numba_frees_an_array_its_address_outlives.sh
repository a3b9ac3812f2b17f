#!/usr/bin/env bash
# Believed: an array made in a function of numba lives until the function returns, as a local variable of Python does.
# So is: numba frees it behind the last use of its name. An address taken from it (`.ctypes.data`, for intrinsics and pointers of one's own) is
# no use: what is read there later is whatever the heap holds, mostly the old values, so that tests pass. Take the address in the loop that
# reads it, or use the name behind it.
# Seen: numba 0.68.1, numpy 2.4.6, Python 3.11, 2026-11-29; arrays alive behind the address was taken, by numba's own counts:
#   name not used again: 0; name used behind: 1
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --disable-pip-version-check numba==0.68.1 numpy==2.4.6 2>/dev/null
cat >"$place/alive.py" <<'PY'
import sys

import numba
import numpy as np
from numba import objmode
from numba.core.runtime import _nrt_python, rtsys

_nrt_python.memsys_enable_stats()


def alive():
    stats = rtsys.get_allocation_stats()
    return int(stats.alloc - stats.free)


@numba.njit
def address_alone(size):
    with objmode(before="int64"):
        before = alive()
    array = np.zeros(size)
    address = array.ctypes.data
    with objmode(behind="int64"):
        behind = alive()
    return behind - before, address


@numba.njit
def name_used_behind(size):
    with objmode(before="int64"):
        before = alive()
    array = np.zeros(size)
    address = array.ctypes.data
    with objmode(behind="int64"):
        behind = alive()
    return behind - before, address + int(array[0])


first, second = address_alone(512)[0], name_used_behind(512)[0]
print(f"arrays alive: name not used again {first}, name used behind {second}")
sys.exit((first, second) != (0, 1))
PY
"$place/venv/bin/python" "$place/alive.py"
