"""Files of requests, and batches that answer them: what the database knows of them.

`lines` cuts an upload into parts of whole lines; `files` keeps them.
"""
