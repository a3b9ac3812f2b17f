"""Admission of what a version gives in place of text.

`heads` finds a classifier's head among an adapter's tensors. `files` reads labels and poolings from files beside it.
"""
