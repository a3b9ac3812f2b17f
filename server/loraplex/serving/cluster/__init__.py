"""Several engines behind one API: which of them holds which adapter, and which of them serves a request.

`demand` measures how much an adapter is asked for, `placement` decides where adapters live, `choice` where a request
goes. All three are pure: they know neither sockets nor clocks. `hashing` gives their order of members.
"""
