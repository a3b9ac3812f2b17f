"""The time of steps, and its bound."""
