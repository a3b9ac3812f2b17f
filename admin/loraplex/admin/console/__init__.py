"""The console: one page with ES modules, which calls the public API with the secret of the person who uses it.

- `routes.console_routes`: the page and its files, for either port.
- `static`: the files. `vendor/digests.json` names the libraries among them.
"""
