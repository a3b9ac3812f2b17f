"""The guard of a release: decides whether a new version is worse than the one it replaces, while both serve.

Pure: no I/O and no clock; the time is an argument, and all state is JSON.

- `evidence.Evidence`: the e-process of one metric, a sequential test of two arms.
- `rules.Rules`: the metrics that are compared, their margins, the rate of false alarms.
- `guard.Guard`: outcomes and running requests in, a verdict out.
- `schedule`: the steps of a release, and when the next begins.

One server is to run it, elected by a lease in the database. It reads `Outcome`s from the usage ledger
(`loraplex.control.usage.outcome`) and the rows that servers write of their running requests, and writes the guard's
JSON beside the release. Neither the lease, nor these rows, nor the routes exist yet.
"""
