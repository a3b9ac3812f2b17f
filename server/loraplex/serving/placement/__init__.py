"""Which engine has which adapter, and which one serves a request: pure functions, and the state between two rounds."""
