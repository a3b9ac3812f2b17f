"""Layers of `fused.FusedDecoder`, a file a kind: its weights, its groups of sites, its forward pass."""
