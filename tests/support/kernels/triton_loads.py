"""Counts loads that wait for each other in a kernel's PTX."""

from __future__ import annotations

import re

_REGISTER = re.compile(r"%[a-z]+\d+")
_LABEL = re.compile(r"(\$L__BB\d+_\d+):")
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$L__BB\d+_\d+)")
_OPERATION = re.compile(r"(?:@!?%p\d+\s+)?([a-z][a-z0-9_.:]*)\s")


def loads_before_product(ptx: str) -> int:
    """How many loads from global memory lie one behind the other, each for the address of the next, between the
    beginning of the kernel's longest loop and the first operand of a matrix product in it; 0 where there is none.

    Registers that are loaded in an earlier turn of the loop count as there. What goes through shared memory counts as
    the last of all that was written there.
    """
    depth: dict[str, int] = {}
    shared = 0
    for line in _longest_loop(ptx.splitlines()):
        found = _OPERATION.match(line)
        registers = _REGISTER.findall(line)
        if found is None or not registers:
            continue
        operation = found.group(1)
        before, _, rest = line.partition("[")
        address = max((depth.get(name, 0) for name in _REGISTER.findall(rest)), default=0)
        loaded = [name for name in _REGISTER.findall(before) if not name.startswith("%p")]
        if operation.startswith(("mma", "wgmma")):
            return max(depth.get(name, 0) for name in registers)
        if operation.startswith("ld.global"):
            depth.update(dict.fromkeys(loaded, address + 1))
        elif operation.startswith("cp.async") and rest:
            shared = max(shared, address + 1)
        elif operation.startswith("st.shared"):
            shared = max(shared, *(depth.get(name, 0) for name in registers))
        elif operation.startswith(("ld.shared", "ldmatrix")):
            depth.update(dict.fromkeys(loaded, shared))
        elif not operation.startswith(("st.", "bar", "bra")):
            own = registers[1:] if line.startswith("@") else registers
            depth[own[0]] = max((depth.get(name, 0) for name in own[1:]), default=0)
    return 0


def _longest_loop(lines: list[str]) -> list[str]:
    lines = [line.partition("//")[0].strip() for line in lines]
    labels = {found.group(1): at for at, line in enumerate(lines) if (found := _LABEL.match(line))}
    loops = [
        lines[labels[found.group(1)] : at]
        for at, line in enumerate(lines)
        if (found := _BRANCH.search(line)) and labels.get(found.group(1), at) < at
    ]
    return max(loops, key=len, default=[])
