"""Usage: sums of what was served, the last hour of the server's requests, and single ones."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, WithJsonSchema

from loraplex.admin.schemas import described
from loraplex.admin.schemas.fields import (
    GivenTime,
    OmittedNull,
    PageQuery,
    PlainText,
    QueryParameters,
    ResponseBody,
    Timestamp,
)
from loraplex.control.history.history import Sort, Span
from loraplex.control.recent_requests import Kind
from loraplex.control.rules import MAX_PAGE
from loraplex.control.usage.columns import GROUPS, Bucket, Group


def _groups(value: str | None) -> str | None:
    names = [] if value is None else value.split(",")
    if len(set(names)) < len(names) or not set(names) <= set(GROUPS):
        raise ValueError(f"some of {', '.join(GROUPS)}, each once, separated by commas")
    return value


class OwnUsageQuery(PageQuery):
    """The period is start ≤ time < end; without `start` the 30 days before `end`, without `end` until now."""

    start: Annotated[GivenTime | None, OmittedNull()] = None
    end: Annotated[GivenTime | None, OmittedNull()] = None
    bucket: Bucket = "day"
    group_by: Annotated[str | None, AfterValidator(_groups), WithJsonSchema(described.GROUP_BY)] = None

    @property
    def groups(self) -> list[Group]:
        given = set((self.group_by or "").split(","))
        return [name for name in GROUPS if name in given]


class UsageQuery(OwnUsageQuery):
    tenant: Annotated[Annotated[PlainText, Field(max_length=63)] | None, OmittedNull()] = None


class UsageSum(ResponseBody):
    """Sums of a group in a bucket that begins at `start`; null where they are not parted by that. `adapter` is
    `(base)` for the base model, whose `version` is null."""

    start: Timestamp | None
    tenant: str | None
    key: str | None
    adapter: str | None
    version: str | None
    status: str | None
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class UsagePage(ResponseBody):
    data: list[UsageSum]
    next_cursor: str | None


class OwnHistoryQuery(QueryParameters):
    """`range`: the last 5 minutes in slices of 10 s, or the last hour in slices of a minute. `adapter`: its name.
    `limit`: the rows of tenants and of adapters, the largest by `sort` first."""

    range: Span = "5m"
    adapter: Annotated[Annotated[PlainText, Field(max_length=63)] | None, OmittedNull()] = None
    sort: Sort = "errors"
    limit: Annotated[int, Field(ge=1, le=MAX_PAGE)] = 100


class HistoryQuery(OwnHistoryQuery):
    tenant: Annotated[Annotated[PlainText, Field(max_length=63)] | None, OmittedNull()] = None


class HistoryFigures(ResponseBody):
    """`errors` failed by the server's doing, `limited` were refused by a limit (429). Prompt tokens are computed, or
    cached. Times at the median and at 95 %, from fixed buckets: from the arrival of a request to its first token, and
    the mean time between its tokens; null where there was none."""

    requests: int
    errors: int
    limited: int
    computed_tokens: int
    cached_tokens: int
    output_tokens: int
    first_token_seconds: float | None
    first_token_p95_seconds: float | None
    gap_seconds: float | None
    gap_p95_seconds: float | None


class HistorySlice(ResponseBody):
    start: Timestamp
    figures: HistoryFigures


class HistoryRow(ResponseBody):
    """A tenant, where `adapter` is null, or a version of an adapter. `adapter` is `(base)` for the base model, whose
    `version` is null."""

    tenant: str
    adapter: str | None
    version: str | None
    figures: HistoryFigures


class HistoryServer(ResponseBody):
    """The process that counted: an id of its own, the machine (null for a tenant), and since when it counts. Another
    process has another history."""

    id: str
    node: str | None
    since: Timestamp


class History(ResponseBody):
    """`slices` are in order, the oldest first, and have ended. `other_tenants` and `other_adapters` are what no row has
    of the total. `exact` is false where a slice had more tenants or adapters, of all tenants, than it keeps, so that
    a row may be too small; so may `slices` and `total` of one tenant or adapter, sums of the rows that were kept."""

    server: HistoryServer
    slice_seconds: int
    slices: list[HistorySlice]
    total: HistoryFigures
    tenants: list[HistoryRow]
    other_tenants: HistoryFigures
    adapters: list[HistoryRow]
    other_adapters: HistoryFigures
    exact: bool


class OwnRequestQuery(PageQuery):
    """`adapter`: a name, or one with its version as in `support@v3`; `(base)` for the base model. `status`: of HTTP.
    `id`: what `x-request-id` said, or an answer's `id`."""

    adapter: Annotated[Annotated[PlainText, Field(min_length=1, max_length=80)] | None, OmittedNull()] = None
    status: Annotated[Annotated[int, Field(ge=100, le=599)] | None, OmittedNull()] = None
    kind: Annotated[Kind | None, OmittedNull()] = None
    id: Annotated[Annotated[PlainText, Field(min_length=1, max_length=160)] | None, OmittedNull()] = None


class RequestQuery(OwnRequestQuery):
    tenant: Annotated[Annotated[PlainText, Field(min_length=1, max_length=63)] | None, OmittedNull()] = None


class RequestSeconds(ResponseBody):
    """Times from the arrival of a request; null where it did not come so far. `queue`: the longest time in the engine's
    queue of its sequences; `load`: the part of it that one waited for its adapter, null where none did."""

    queue: float | None
    load: float | None
    first_token: float | None
    total: float


class RequestTokens(ResponseBody):
    prompt: int
    cached: int
    completion: int


class RequestRow(ResponseBody):
    """A request that ended, without any text of its prompt or answer. `kind`: `failed` by the server; `refused` by a
    status from 400 to 499, or given up by its client; `slow`. `tenant` and `key` are null where the secret was none.
    `model` was asked for, where it was not found; `adapter` is `(base)` for the base model. `status` is null where no
    answer began; `code` says why it ended early."""

    request_id: str
    id: str
    time: Timestamp
    kind: Kind
    tenant: str | None
    key: str | None
    route: str
    model: str | None
    adapter: str | None
    version: str | None
    status: int | None
    code: str | None
    seconds: RequestSeconds
    tokens: RequestTokens
    trace_id: str | None


class RequestPage(ResponseBody):
    data: list[RequestRow]
    next_cursor: str | None
