"""Mixers with a state for each sequence: gated delta nets, and what they have around their rule.

`torch_recurrent` has the formulas, and runs anywhere. `types` has what a step and a layer's memory are to all of them.
"""

WINDOW = 16
"""Positions of a window: the state is written at its end. A KV block has as many."""
COLUMNS = 32
"""Columns of a state that lie together."""
SMALLEST = 1e-24
"""Coefficients of a state and of updates below are zero."""
HEADER_BYTES, UNIT_BYTES = 64, 64
"""Bytes of a step's table before its units, and of each unit (`types.RecurrentRows`)."""
