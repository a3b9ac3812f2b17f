"""The kernels of a decoder layer beside attention, linears and LoRA: norms, RoPE and activations.

`norm`, `rope` and `activation` hold the formulas in torch. `triton_*` are their GPU paths and `numba_*` their
CPU paths; `loraplex.kernels.ops` chooses between them.
"""
