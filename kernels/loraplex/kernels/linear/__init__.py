"""Base linears: y = x·Wᵀ + b, for weights in 16 or 32 bits, and for codes in groups with scales."""
