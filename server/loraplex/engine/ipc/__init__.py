"""The engine as a process of its own, and what it says to its client.

`process.main` is `python -m loraplex.engine.ipc.process`. `loop.EngineLoop` is the step thread. `protocol` defines the
messages: msgpack frames over a Unix stream socket.
"""
