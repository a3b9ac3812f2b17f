"""Models: from a checkpoint to a function from a flat batch and a KV cache to logits.

`base.Model` is the interface. `loading.load_model` makes a model of a directory. `fused.FusedDecoder` is our own layer
loop for Llama and its relatives; `wrapped.TransformersDecoder` runs any other decoder that passes `probe.probe`.
"""
