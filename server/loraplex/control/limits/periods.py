"""The periods of budgets, by the calendar in UTC."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from loraplex.control.types import BudgetPeriod

EVER = datetime(1970, 1, 1, tzinfo=UTC)
"""When the one period that never ends began."""


def period_start(period: BudgetPeriod, now: datetime) -> datetime:
    now = now.astimezone(UTC)
    if period == "hour":
        return now.replace(minute=0, second=0, microsecond=0)
    if period == "day":
        return now.replace(hour=0, minute=0, second=0, microsecond=0)
    if period == "month":
        return now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    return EVER


def period_end(period: BudgetPeriod, start: datetime) -> datetime | None:
    """The next one's beginning; None where there is none."""
    if period == "hour":
        return start + timedelta(hours=1)
    if period == "day":
        return start + timedelta(days=1)
    if period == "month":
        return (start + timedelta(days=32)).replace(day=1)
    return None


def in_words(limit: int, period: BudgetPeriod) -> str:
    return f"{limit} tokens in all" if period == "forever" else f"{limit} tokens {_EACH[period]}"


_EACH = {"hour": "an hour", "day": "a day", "month": "a month"}
