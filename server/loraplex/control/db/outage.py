"""Whether the database can be reached: known to every caller at once, found out by one thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import structlog

from loraplex.control.errors import DatabaseUnavailable

PROBE_INTERVAL_S = 0.5
log = structlog.get_logger("loraplex")


class Outage:
    """While the database is gone every call fails at once, and one thread asks whether it is back: no request waits
    for a time-out that another has waited for. For any thread."""

    def __init__(self, probe: Callable[[], None], *, interval_s: float = PROBE_INTERVAL_S) -> None:
        """`probe` returns when the database answers, and raises when it does not, after a bounded time."""
        self._probe = probe
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._since: float | None = None

    @property
    def seconds(self) -> float | None:
        """How long the database has been gone; None while it is there."""
        since = self._since
        return None if since is None else time.monotonic() - since

    def check(self) -> None:
        """Raises DatabaseUnavailable."""
        if self._since is not None:
            raise DatabaseUnavailable()

    def report_lost(self, reason: str) -> None:
        """A call found that the database is gone."""
        with self._lock:
            if self._since is not None or self._closed.is_set():
                return
            self._since = time.monotonic()
        log.error("database_lost", reason=reason)
        try:
            threading.Thread(target=self._watch, name="database-probe", daemon=True).start()
        except RuntimeError as error:  # no thread is to be had: then the next caller finds out by itself
            log.error("database_not_watched", reason=str(error))
            self._since = None

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(self._interval_s):
            try:
                self._probe()
            except Exception:  # noqa: S112 - whatever it is, the database does not answer
                continue
            with self._lock:
                gone_s, self._since = self.seconds or 0.0, None
            log.info("database_back", seconds=round(gone_s, 1))
            return


class DatabaseHealth:
    """The health of serving in an outage: for `staleness_s` only a warning, since cached rows are served."""

    def __init__(self, outage: Outage, staleness_s: float) -> None:
        self._outage = outage
        self._staleness_s = staleness_s

    @property
    def outage_s(self) -> float:
        """Seconds since the database was lost; 0 while it is there."""
        return self._outage.seconds or 0.0

    def warning(self) -> str | None:
        gone_s = self._outage.seconds
        if gone_s is None:
            return None
        return f"the database has not been reached for {gone_s:.0f} s; what is remembered serves"

    def failure(self) -> str | None:
        gone_s = self._outage.seconds
        if gone_s is None or gone_s < self._staleness_s:
            return None
        return f"the database has not been reached for {gone_s:.0f} s, and nothing that is remembered is young enough"
