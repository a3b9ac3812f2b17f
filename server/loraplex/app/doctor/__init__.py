"""`loraplex doctor`: what this machine, these settings and this data directory are fit for.

`checks.examine` runs all checks. `torch_checks` asks torch, in a process of its own.
"""
