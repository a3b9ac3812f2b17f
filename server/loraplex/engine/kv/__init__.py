"""The KV cache: what each layer keeps of a sequence, and who holds which block.

`layers.CacheKind` says what a layer keeps, `layers.BlockNeeds` how many blocks that takes. `cache.KVCache` is the
memory of all layers, the one module here with torch. `blocks.BlockManager` hands out blocks and finds them by the keys
of `prefix_keys`; `sequence_blocks.SequenceBlocks` does so for the sequences of a scheduler.
"""
