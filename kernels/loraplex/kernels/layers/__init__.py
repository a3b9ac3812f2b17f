"""The kernels of a decoder layer beside attention and LoRA: norms, RoPE, activations and dense linears.

`norm`, `rope`, `activation` and `dense` hold the formulas in torch. `triton_*` are their GPU paths and `numba_*` their
CPU paths; `loraplex.kernels.ops` chooses between them.
"""
