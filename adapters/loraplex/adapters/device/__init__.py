"""Adapters in memory: tiles of eight ranks in equal pages, in host memory as on the device.

`transport.ThreadedTransport` loads adapters, in threads of its own. `layout.ArenaLayout` says how an adapter is cut
into tiles. `host_image.build_image` lays one out in host memory. `arena.AdapterArena` holds the pages of the device.
`device_lora.DeviceLora` gives the programs of a GPU their tables.
"""
