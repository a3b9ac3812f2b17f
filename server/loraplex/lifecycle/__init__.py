"""Keeping the engine in step with the catalog.

`version_checks` has the engine measure new versions, and the catalog decide. `eviction` takes what was deleted out of
the engine, and unused pins; `catalog_watch` does so for what other servers change, and pins. `damage_reports` marks in
the catalog what the engine found damaged. `tenant_terms` brings changed weights and limits to the engine. `warming`
pins and loads the working set after a start, by the demand that `demand_file` has.
"""
