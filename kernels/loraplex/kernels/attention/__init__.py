"""Attention over a paged KV cache, for a flat batch of ragged sequences.

`dispatch` has the formula. `kernel.AttentionKernel` is the seam, `choice.choose_attention` chooses the implementation.
`triton_kernel` is the GPU path, `numba_kernel` the CPU path, `torch_attention` runs anywhere.
"""
