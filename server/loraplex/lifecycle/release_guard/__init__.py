"""The guard of a release: decides whether a new version is worse than the one it replaces, while both serve.

Pure: no I/O and no clock; the time is an argument, and all state is JSON.

- `evidence.Evidence`: the e-process of one metric, a sequential test of two arms.
- `rules.Rules`: the metrics that are compared, their margins, the rate of false alarms.
- `guard.Guard`: outcomes and running requests in, a verdict out.
- `schedule`: the steps of a release, and when the next begins.

`loraplex.lifecycle.releases` runs it on one of all servers.
"""
