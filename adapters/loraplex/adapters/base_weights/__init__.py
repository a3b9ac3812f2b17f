"""Weights of the base as codes in groups: the one form in which quantised linears are kept, and its one dequantiser."""
