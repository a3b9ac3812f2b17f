"""The streamed multipart body of an adapter.

`receive.receive_upload` writes it to a staging folder; `multipart.UploadParser` cuts it into its known parts.
"""
