"""Sampling on the device: one token for each row of logits.

`triton_sampling.TritonSampling` is the GPU path. `numba_sampling.draw` and `numba_argmax.largest` are the CPU path.
`types.SampleRows` holds the options of a step's rows.
"""
