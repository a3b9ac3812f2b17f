"""Batched LoRA: each row of a batch gets the low-rank update of its own adapter.

`dispatch.begin_pass` prepares a step on `reference.TorchLoraPass`, the formula in torch, or on
`numba_lora.NumbaLoraPass`, the CPU path. `triton_lora.TritonLora` is the GPU path. `types` holds what they share.
"""
