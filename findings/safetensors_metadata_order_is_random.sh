#!/usr/bin/env bash
# Believed: safetensors files of the same tensors and the same metadata are the same bytes, so that a digest of the file names its content.
# So is: with two or more metadata keys each save writes them in another order (tensors are sorted, metadata is a hash map of the process):
# a few saves give as many digests. PEFT writes one key ({"format": "pt"}) and is stable; MLX, merge tools and trainers that note
# their versions or settings are not. A store that is keyed by the file's digest holds such an adapter twice; compare tensors, or
# write the header again with its keys sorted.
# Seen: safetensors 0.8.0, numpy 2.3.5, Python 3.11, 2026-11-28:
#   one key: 1 digest in 8 saves; four keys: 6 digests in 8 saves (of 24 orders, so the number varies)
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --disable-pip-version-check safetensors==0.8.0 numpy==2.3.5 2>/dev/null
cat >"$place/save.py" <<'PY'
import hashlib
import sys

import numpy as np
from safetensors.numpy import save

tensors = {"a": np.zeros((2, 2), np.float32), "b": np.ones(3, np.float32)}
one = {"format": "pt"}
four = one | {"base": "tiny", "rank": "8", "trainer": "own"}
digests = [len({hashlib.sha256(save(tensors, metadata=keys)).hexdigest() for _ in range(8)}) for keys in (one, four)]
print(f"one key: {digests[0]} digest in 8 saves; four keys: {digests[1]} digests in 8 saves")
sys.exit(0 if digests[0] == 1 and digests[1] > 1 else "changed")
PY
"$place/venv/bin/python" "$place/save.py"
