"""Clients of the engine: submit a request, read its events, abort it.

`engine_client.EngineClient` is the interface. `session.EngineSession` is a client without its transport.
`socket_client.SocketEngineClient` talks to an engine process.
"""
