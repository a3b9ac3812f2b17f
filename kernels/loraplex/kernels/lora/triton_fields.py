"""Numbers on which the host, which writes a step's list of work, and the programs that walk it agree.

They are apart from both, so that a change of the planner or of a tiling leaves the programs' sources as they are.
"""

LIST_FIELDS = 4
"""Number of fields of a list's head."""
PIECE_FIELDS = 8
"""First row, rows, slot, first chunk, and of the piece's hidden values: where they begin, ranks a row, and the rows of
the A side's piece that they are part of, where B sides go by rows; one unused."""
UNIT_FIELDS = 8
"""Site, whose hidden values it takes, first column, the site's columns, where those begin in y; three unused."""
RECORD_HEAD = 2
"""Fields before the offsets in a site's record: the number of chunks and the offset of the vectors. MAX_CHUNKS offsets
of A tiles follow, and as many of B tiles."""
ROW_ROWS = 4
"""B sides of pieces of up to this number of rows are computed without tensor cores."""
