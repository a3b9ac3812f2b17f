"""Which version of a release a sticky caller gets, as a pure function."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping


def sticky_version(release: str, caller: str, weights: Mapping[int, int]) -> int:
    """The version for this caller, by weighted rendezvous hashing: each version has a point for the caller, drawn from
    an exponential distribution by a hash, and the smallest point over its weight wins. So a caller moves only to a
    version whose weight rose, or from one whose weight fell, in whatever order the versions are given.

    `release` names the release, the same in all its revisions; `weights` by version, above 0, not empty.
    Source: Thaler, Ravishankar, Using name-based mappings to increase hit rates, IEEE/ACM ToN 1998; with weights as in
    Schindelhauer, Schomaker, Weighted distributed hash tables, SPAA 2005 (the logarithmic method).
    """
    label = f"{release}/{caller}".encode("utf-8", "surrogatepass")
    prefix = hashlib.sha256(label)

    def point(version: int) -> float:
        digest = prefix.copy()
        digest.update(f"\0{version}".encode())
        # 53 bits, and never 0, whose logarithm there is none of.
        uniform = ((int.from_bytes(digest.digest()[:8], "big") >> 11) + 0.5) / 2**53
        return -math.log(uniform) / weights[version]

    return min(weights, key=lambda version: (point(version), version))
