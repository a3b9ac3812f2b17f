"""Usage: what each request used, on the disk before its answer ends.

`journal.UsageJournal` records requests on the local disk. `writer.UsageWriter` brings the records to the database,
exactly once. `report.UsageReports` sums them. `roll_up.UsageRollUp` turns old rows into sums of days.
"""
