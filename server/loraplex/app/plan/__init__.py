"""`loraplex plan`: the memory, places and settings of a server before there is one.

`memory.divide_memory` divides a device's memory by the server's own code. `speed.decode_speeds` is the model of
docs/performance.md. `devices.DEVICES` and `shapes.SHAPES` are the devices and models that are known by name.
"""
