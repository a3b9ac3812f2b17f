"""Attention over a paged KV cache, for a flat batch of ragged sequences.

`torch_attention` has the formula, and runs anywhere. `kernel.AttentionKernel` is the seam, `choice.choose_attention`
chooses the implementation. `triton_kernel` is the GPU path, `numba_attention` the CPU path.
"""

BLOCK_SIZE = 16
"""Positions of a KV block."""
