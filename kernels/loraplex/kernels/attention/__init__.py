"""Attention over a paged KV cache, for a flat batch of ragged sequences.

`dispatch.paged_attention` and `dispatch.write_kv` choose the implementation. `reference` is the formula in torch.
`triton_attention` is the GPU path, `numba_attention` the CPU path. `types.AttentionBatch` is a step's batch.
"""
