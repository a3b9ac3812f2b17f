"""Adapters that are read from a place which the operator allowed, instead of from a request's body.

`urls.AllowedSources` turns a URL or a path into a `Source`, or refuses it. `folder.copy_folder` reads one.
"""
