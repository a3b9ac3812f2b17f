"""Structured output: from what a client asks to one llguidance grammar, and its check.

`builders` has the pure functions (`json_schema`, `json_object`, `regex`, `choice`, `lark`, and `json_schema_fragment`
for use within a Lark grammar). `checker.GrammarChecker` builds a grammar once in a process that can be killed.
`schema_rules.locate` finds the place in a schema that a refusal speaks of.
"""
