"""Admission by numbers: what the engine computes of a version beside a reference of its own.

`probes` has the fixed inputs and the sketches of outputs, which the engine uses too. `SiteOutputs` is what it sends.
`NumbersCheck` compares it with the reference, which reads the upload itself. No torch.
"""

from loraplex.adapters.numerics.check import MAX_ERROR, TOLERANCE, NumbersCheck, NumbersVerdict
from loraplex.adapters.numerics.outputs import SiteOutputs, join_outputs
from loraplex.adapters.numerics.probes import EMBEDDING_ROWS, HEAD_ROWS, INPUT_ROWS, PROBE_ROWS, SKETCH_SUMS

__all__ = [
    "EMBEDDING_ROWS",
    "HEAD_ROWS",
    "INPUT_ROWS",
    "MAX_ERROR",
    "PROBE_ROWS",
    "SKETCH_SUMS",
    "TOLERANCE",
    "NumbersCheck",
    "NumbersVerdict",
    "SiteOutputs",
    "join_outputs",
]
