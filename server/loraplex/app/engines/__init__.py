"""Engines that dial in: the server's port for them, and the command that runs one.

`port` is the server's side, `process` is `loraplex engine`, `logs` has the log lines of both.
"""
