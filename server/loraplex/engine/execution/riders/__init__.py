"""The by-products of steps, one class a kind.

`rider.Rider` says when each is asked. `batch.StepRows` makes those that a plan needs, and `runner.ModelRunner` asks
them. `tokens.Tokens` is in every step with rows.
"""
