"""Why an adapter cannot be read from a source."""

from __future__ import annotations

from loraplex.adapters.errors import LoraplexError


class SourceNotAllowed(LoraplexError):
    """The URL is not one that is read, or lies below no prefix of --adapter-sources. Nothing was looked at."""

    code = "source_not_allowed"


class SourceNotFound(LoraplexError):
    """The source lacks one of an adapter's two files, or has something else in its place."""

    code = "source_not_found"


class SourceUnavailable(LoraplexError):
    """The source cannot be read at the moment, or changed while it was read."""

    code = "source_unavailable"
    retry_after_s = 5.0
