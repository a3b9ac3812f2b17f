"""The randomness of sampling, as a function of its place alone."""

from __future__ import annotations

import hashlib
import struct


def uniform(seed: int, choice: int, output_index: int) -> float:
    """A number in [0, 1) for one draw, evenly spread: the first 53 bits of SHA-256 over (seed, choice,
    output_index).

    There is no generator whose state could depend on batch-mates, on preemption or on how far the host looks
    ahead: sampling a token again uses the same number. Counter-based generation as in Salmon et al., "Parallel
    Random Numbers: As Easy as 1, 2, 3" (2011), with a hash that is at hand everywhere.
    """
    # Seeds come from clients and may have any size or sign.
    text = b"%d:%d:%d" % (seed, choice, output_index)
    (word,) = struct.unpack_from("<Q", hashlib.sha256(text).digest())
    return float(word >> 11) * 2.0**-53
