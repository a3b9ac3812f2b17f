"""Measurements of a version by the engine: the outputs of its sites for the probes, as sketches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loraplex.adapters.numerics.probes import EXPERT_SUMS, PROBE_ROWS, SKETCH_SUMS


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
    expert_sites: tuple[tuple[int, str, int], ...] = ()
    """(layer, site, how many experts) of routed experts."""
    expert_sums: bytes = b""
    """float32 [experts of all of these, EXPERT_SUMS], little-endian."""
    expert_finite: bytes = b""
    """A byte an expert."""

    def sketches(self) -> NDArray[np.float32]:
        """[sites, PROBE_ROWS, SKETCH_SUMS] float32. Raises ValueError where the sizes do not fit."""
        found = np.frombuffer(self.sums, "<f4").reshape(-1, PROBE_ROWS, SKETCH_SUMS)
        if not len(found) == len(self.sites) == len(self.finite):
            raise ValueError(f"{len(self.sites)} sites, {len(found)} sketches and {len(self.finite)} flags")
        return found

    def of_experts(self) -> dict[tuple[int, str], tuple[NDArray[np.float32], NDArray[np.bool_]]]:
        """The sums [experts, EXPERT_SUMS] and whether each is finite [experts], by layer and site. Raises ValueError as
        `sketches` does."""
        sums = np.frombuffer(self.expert_sums, "<f4").reshape(-1, EXPERT_SUMS)
        finite = np.frombuffer(self.expert_finite, np.uint8).astype(bool)
        ends = np.cumsum([count for _, _, count in self.expert_sites], dtype=np.int64)
        if not len(sums) == len(finite) == (ends[-1] if len(ends) else 0):
            raise ValueError(f"{len(sums)} sketches and {len(finite)} flags of experts")
        return {
            (layer, site): (sums[end - count : end], finite[end - count : end])
            for (layer, site, count), end in zip(self.expert_sites, ends.tolist(), strict=True)
        }


def join_outputs(parts: Sequence[SiteOutputs]) -> SiteOutputs:
    """The parts of one version behind each other; there must be one at least."""
    return SiteOutputs(
        parts[0].dtype,
        tuple(site for part in parts for site in part.sites),
        b"".join(part.sums for part in parts),
        b"".join(part.finite for part in parts),
        expert_sites=tuple(site for part in parts for site in part.expert_sites),
        expert_sums=b"".join(part.expert_sums for part in parts),
        expert_finite=b"".join(part.expert_finite for part in parts),
    )
