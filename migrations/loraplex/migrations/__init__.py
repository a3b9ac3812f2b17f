"""The database's schema in steps. `run.upgrade` brings a database to this version's schema, `run.examine_schema` says
what it has; `versions/` holds one file a step."""
