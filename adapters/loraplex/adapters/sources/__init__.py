"""Adapters that are read from a place which the operator allowed, instead of from a request's body.

`urls.AllowedSources` turns a URL or a path into a `Source`, or refuses it. `copy.copy_source` reads one,
from a folder, a bucket or the model hub.
"""
