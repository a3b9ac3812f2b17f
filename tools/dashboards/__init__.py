"""Grafana dashboards for a fleet, a tenant, an adapter and a release, as code.

    python -m tools.dashboards          # writes charts/loraplex/dashboards
    python -m tools.dashboards.images   # a server under load, a Prometheus, and docs/images/dashboard-*.png

`boards` has the panels, `grafana` makes Grafana's JSON of them, `queries` reads that JSON again.
"""
