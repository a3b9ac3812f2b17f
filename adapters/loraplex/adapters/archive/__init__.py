"""Archives: uploads are unpacked in bounded memory, downloads are written as tar.

`extract.extract_upload` unpacks a .tar, .tar.gz or .zip into an adapter's two files. `stored_archive.StoredArchive`
is a stored version as a tar.
"""
