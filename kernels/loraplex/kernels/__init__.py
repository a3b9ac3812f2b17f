"""Kernels of the forward pass: one formula each, in torch, Triton (GPU) and numba (CPU).

`backend.resolve_kernels` chooses a backend once, at the start, and gives its `bundle.Kernels`; a backend is one file
(`torch_backend`, `numba_backend`, `triton_backend`). `lora` and `attention` hold the batched kernels, `layers` what a
decoder layer needs beside them, `sampling` the sampling of tokens, `numba_runtime` what kernels in numba are built on.
"""
