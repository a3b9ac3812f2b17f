"""What lies under the names of an adapter's files.

`kinds.identify` names what bytes are that are not the file that was expected. `places.find_adapter` finds the folder of
the adapter among the files of a place.
"""
