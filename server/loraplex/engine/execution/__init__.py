"""Forward passes: from a step plan to tokens.

`runner.ModelRunner` computes step plans, and `riders` what is wanted of them. `executor.Executor` is the thread in
which forward passes run.
`inputs.PlainInputs` and `packed_inputs.PackedInputs` bring a step's numbers to the device. `cuda_graphs` records
decoding steps. `kv_cache.size_kv_cache` sizes the KV cache.
"""
