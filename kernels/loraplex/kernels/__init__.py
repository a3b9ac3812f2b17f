"""Kernels of the forward pass: one formula each, in torch, Triton (GPU) and numba (CPU).

`backend.resolve_backend` chooses the implementation once, at the start. `ops.resolve_ops` gives the layers of a decoder
their functions. `lora` and `attention` hold the batched kernels, `layers` what a decoder layer needs beside them,
`sampling` the sampling of tokens, `numba_runtime` what kernels in numba are built on.
"""
