"""Limits and token budgets of tenants and keys."""

from __future__ import annotations

from pydantic import ConfigDict

from loraplex.admin.schemas import described
from loraplex.admin.schemas.fields import PositiveCount, RequestBody, ResponseBody, Timestamp
from loraplex.control.types import BudgetPeriod


class Limits(RequestBody):
    """null is no limit. `token_budget` is for each `budget_period` of the calendar in UTC: both or neither."""

    requests_per_minute: PositiveCount | None = None
    tokens_per_minute: PositiveCount | None = None
    max_concurrency: PositiveCount | None = None
    max_sequences: PositiveCount | None = None
    token_budget: PositiveCount | None = None
    budget_period: BudgetPeriod | None = None
    max_adapters: PositiveCount | None = None
    max_adapter_bytes: PositiveCount | None = None
    max_output_tokens: PositiveCount | None = None
    device_bytes_reserved: PositiveCount | None = None
    device_bytes_max: PositiveCount | None = None
    host_bytes_max: PositiveCount | None = None
    batch_tokens: PositiveCount | None = None
    batch_percent: PositiveCount | None = None
    file_days: PositiveCount | None = None


class NewLimits(Limits):
    """null is no limit. `token_budget` is for each `budget_period` of the calendar in UTC: both or neither."""

    model_config = ConfigDict(json_schema_extra=described.budget_with_period)


class KeyLimits(Limits):
    """Limits of a key. null is no limit."""

    model_config = ConfigDict(json_schema_extra=described.no_adapters)


class NewKeyLimits(Limits):
    """Limits of a key. null is no limit. `token_budget` is for each `budget_period`: both or neither."""

    model_config = ConfigDict(json_schema_extra=described.new_key_limits)


class BudgetState(ResponseBody):
    """A token budget in its current period; `ends_at` is null where there is no end. `spent` counts requests that
    ended, up to some seconds late; `held` is what servers hold for requests that run and come."""

    limit: int
    period: BudgetPeriod
    starts_at: Timestamp
    ends_at: Timestamp | None
    spent: int
    held: int
    left: int
