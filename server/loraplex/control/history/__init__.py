"""The last hour of a server's requests, in its own memory.

- `figures`: what is counted, and quantiles of the times.
- `slices`: what is kept of some seconds: sums, and the figures of the largest tenants and adapters.
- `history`: the rings of slices, and reports of them.
"""
