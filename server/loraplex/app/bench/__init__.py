"""`loraplex bench`: put load on a running server and measure it.

`workload.Workload` is a seeded list of requests. `load.Load` sends them. `client.Asking` measures one. `report.report`
sums them up.
"""
