"""Code that the commands share.

`client.AdminClient` calls the admin API. `options.admin_command` declares the options that every command takes.
`output.Output` prints tables or JSON. `errors.CommandFailed` becomes one line on stderr. `values` checks what a user
typed.
"""
