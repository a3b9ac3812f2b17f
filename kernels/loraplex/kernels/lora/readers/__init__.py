"""Kernels that compute the B side of batched LoRA and the operation behind it.

Begin at `triton_readers.FusedReaders`.
"""
