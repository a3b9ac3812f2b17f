"""Batched LoRA: each row of a batch gets the low-rank update of its own adapter.

`dispatch.begin_pass` prepares a step and chooses the implementation. `reference.TorchLoraPass` is the formula in torch.
`triton_lora.TritonLora` is the GPU path, `numba_lora.NumbaLoraPass` the CPU path. `types` holds what they share.
"""
