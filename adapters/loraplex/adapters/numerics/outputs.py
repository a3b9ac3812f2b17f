"""Measurements of a version by the engine: the outputs of its sites for the probes, as sketches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loraplex.adapters.numerics.probes import PROBE_ROWS, SKETCH_SUMS


@dataclass(frozen=True, slots=True)
class SiteOutputs:
    """Sites of one version, each with its sketches, in order.

    `dtype`: what the model is served in, such as "bfloat16". `sites`: (layer, site); the head has layer 0. `sums`:
    float32 [sites, PROBE_ROWS, SKETCH_SUMS], little-endian. `finite`: one byte a site, 1 where every value of its
    outputs is finite. Where it is 0 the sums may be anything. `failure`: why the engine could not load the version at
    all; there are no sites then.
    """

    dtype: str
    sites: tuple[tuple[int, str], ...]
    sums: bytes
    finite: bytes
    failure: str = ""

    def sketches(self) -> NDArray[np.float32]:
        """[sites, PROBE_ROWS, SKETCH_SUMS] float32. Raises ValueError where the sizes do not fit."""
        found = np.frombuffer(self.sums, "<f4").reshape(-1, PROBE_ROWS, SKETCH_SUMS)
        if not len(found) == len(self.sites) == len(self.finite):
            raise ValueError(f"{len(self.sites)} sites, {len(found)} sketches and {len(self.finite)} flags")
        return found


def join_outputs(parts: Sequence[SiteOutputs]) -> SiteOutputs:
    """The parts of one version behind each other; there must be one at least."""
    return SiteOutputs(
        parts[0].dtype,
        tuple(site for part in parts for site in part.sites),
        b"".join(part.sums for part in parts),
        b"".join(part.finite for part in parts),
    )
