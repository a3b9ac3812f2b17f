"""The families of `fused.FusedDecoder`: what a row can say, and the rows."""
