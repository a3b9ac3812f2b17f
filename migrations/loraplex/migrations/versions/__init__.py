"""The steps of the schema, one file each, in the order of their numbers. A step that was released is not changed."""
