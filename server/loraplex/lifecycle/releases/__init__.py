"""Runs the releases that are watched: one server of all looks at them each second, and changes what its guard or its
schedule asks for.

- `look.look`: one look at one release, in the transaction of the server that leads.
- `rounds.Rounds`: the lease, and a round of looks.
- `task.ReleaseTask`: the server's loop, which also keeps the arms of watched releases loaded.
- `webhook`: the addresses that may be told, and one delivery; `deliveries` has those that wait.
"""
