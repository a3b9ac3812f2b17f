"""The audit log: who changed what, from where, and how it was before.

`recorder.record` writes a row in the transaction of the change. `log.AuditLog` reads rows, and writes those of refused
calls. `verification.verify` checks that the log is whole.
"""
