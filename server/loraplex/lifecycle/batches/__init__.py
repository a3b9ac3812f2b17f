"""Running batches on one server."""
