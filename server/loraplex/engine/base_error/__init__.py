"""The measurement of what another form of the base does to an adapter's answers, in a process of its own.

`messages` is what the server sends and gets, `__main__` the process, `forms` the base in one form, `comparison` the
answers over two of them.
"""
