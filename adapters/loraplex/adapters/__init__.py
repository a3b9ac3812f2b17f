"""Adapters: from an upload of two untrusted files to tiles in device memory.

`admission.inspection.inspect_adapter` validates an upload. `store.artifact_store.ArtifactStore` keeps it on disk by its
digest. `cache.adapter_cache.AdapterCache` decides which adapters are in host and device memory. `device.arena` holds
them on the device. `ref.AdapterRef` is what every layer calls an adapter version.
"""
