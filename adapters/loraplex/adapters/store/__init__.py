"""The store of adapter files on a local disk.

`artifact_store.ArtifactStore` keeps artifacts by their digest. `files` names, reads and writes an adapter's two files.
`tensors` reads tensors out of a safetensors file. `fault_points.FaultPoint` names each step at which a disk may fail.
"""
