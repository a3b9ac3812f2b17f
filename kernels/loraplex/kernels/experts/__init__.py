"""Mixtures of experts: the router's choice, rows grouped by expert, and their linears.

`torch_experts` has the formulas, and runs anywhere. `types` has what they share.
"""
