"""The two ports of a server.

`sockets.open_ports` takes both at once. `connections.ConnectionTable` bounds how many connections are open.
`swappable_app.Listening` serves both, and switches the applications behind them.
"""
