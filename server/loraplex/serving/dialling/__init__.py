"""Engines that dial in: the server's port (`members`, `remote`), and the relay around an engine process (`relay`,
`link`)."""
