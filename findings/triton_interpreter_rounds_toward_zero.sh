#!/usr/bin/env bash
# Believed: TRITON_INTERPRET=1 rounds float32 to bfloat16 and to float8 as the compiled kernel and torch do, to nearest, ties to even.
# So is: the interpreter cuts bfloat16 off (1.0067 becomes 1.0, not 1.0078), and where rounding to float8e4nv carries into the exponent it
# can lose the carry (1.9688 becomes 1.0, not 2.0; 0.4922 becomes 0.25, not 0.5; 0.9844 is right). An interpreted kernel is off by up to
# a whole last place in bfloat16, always toward zero, and by a factor of two in float8: test with that tolerance, and round to
# float8 outside of the interpreter.
# Seen: triton 3.7.1, torch 2.13.0 (CPU), Python 3.11, 2026-11-28:
#   torch.bfloat16 interpreted [1.0, 1.0, -2.7031, 0.0996] torch [1.0078, 1.0078, -2.7188, 0.1001]
#   torch.float8_e4m3fn interpreted [1.0, 448.0, 1.0, 0.25] torch [2.0, 448.0, 1.0, 0.5]
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy 2>/dev/null
"$place/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps triton==3.7.1 2>/dev/null
cat >"$place/rounding.py" <<'PY'
import sys

import torch
import triton
import triton.language as tl


@triton.jit
def cast(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, tl.load(x + at).to(y.dtype.element_ty))


def interpreted(values, dtype):
    out = torch.empty(len(values), dtype=dtype)
    cast[(1,)](values, out, N=len(values))
    return out.float()


changed = False
for dtype, given in ((torch.bfloat16, [1.0067, 1.00586, -2.71828, 0.1]), (torch.float8_e4m3fn, [1.9688, 447.0, 0.9844, 0.4922])):
    values = torch.tensor(given)
    here, right = interpreted(values, dtype), values.to(dtype).float()
    print(dtype, "interpreted", [round(x, 4) for x in here.tolist()], "torch", [round(x, 4) for x in right.tolist()])
    changed |= torch.equal(here, right)
sys.exit("changed: the interpreter rounds as torch does" if changed else 0)
PY
TRITON_INTERPRET=1 "$place/venv/bin/python" "$place/rounding.py"
