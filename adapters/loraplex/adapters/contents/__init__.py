"""Contents of an adapter's files, whatever their names.

`kinds.identify` names what bytes are that are not the file that was expected. `places.find_adapter` finds the folder of
the adapter among the files of a place.
"""
