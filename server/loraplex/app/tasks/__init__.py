"""Tasks that a server runs beside its requests; `loraplex.app.serve` starts them.

`damage_reports.DamageReports` reports damaged adapters to the catalog. `tenant_terms.TermsWatch` brings changed
weights and limits to the engine. `warming.Warming` loads the working set after a start, and records the demand for it.
"""
