"""A copy of what a server needs, made while it serves: `run.make_backup`."""
