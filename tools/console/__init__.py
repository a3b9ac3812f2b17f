"""Pictures of the console."""
