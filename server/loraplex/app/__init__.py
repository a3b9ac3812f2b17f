"""The program: `loraplex` and its commands, and a server built of its parts.

`cli.main` is the program. `settings.Settings` has every option of a server. `factory` builds a server's parts from
them. `serve.serve` runs a server until it is stopped. `quickstart.run_quickstart` is the demonstration.
"""
