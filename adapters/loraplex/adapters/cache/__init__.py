"""The adapter cache: which adapters are on disk, in host memory and on the device. No torch.

`adapter_cache.AdapterCache` is the state machine, and hands out leases. `eviction` chooses what leaves device and host
memory. `prefetch_queue.PrefetchQueue` holds hints. `residency` has the types that the cache, its transport and its
callers share.
"""
