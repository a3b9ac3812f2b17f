"""The KV cache: what each layer keeps of a sequence, and who holds which block.

`layers.LayerCache` says what a layer keeps. `cache.KVCache` is the memory of all layers, the one module here with
torch. `blocks.BlockManager` hands out blocks and finds cached prefixes by the keys of `prefix_keys`; `block_needs` says
how many blocks a sequence needs.
"""
