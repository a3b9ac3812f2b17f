"""The database: connections, tables, and what its failures mean.

`database.Database` runs synchronous sessions in a bounded pool of threads. `tables` defines the tables. `outage.Outage`
says whether the database can be reached. `read_through.ReadThrough` keeps values of the database in memory.
"""
