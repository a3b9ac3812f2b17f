"""The commands of `loraplex`, one module each; `loraplex.app.cli` loads the one that is asked for.

`shared` holds what they have in common: the HTTP client, options, output and errors.
"""
