"""Adapters and their versions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, WithJsonSchema, model_validator

from loraplex.adapters.pooled import HeadTask, ProblemType, VectorPooling
from loraplex.adapters.sources.urls import MAX_URL_CHARS
from loraplex.admin.schemas import described
from loraplex.admin.schemas.fields import (
    OmittedNull,
    PageQuery,
    QueryParameters,
    RequestBody,
    ResponseBody,
    Timestamp,
)
from loraplex.admin.schemas.releases import Release
from loraplex.control.adapter_tags import MAX_TAGS
from loraplex.control.release_types import RunStatus
from loraplex.control.types import Checked, VersionState, WithoutInvocation
from loraplex.control.usage.overview import BaseFilter, ReleaseFilter, Sort
from loraplex.serving.output.formats import ReasoningFormatName, ToolFormatName


class VersionServing(ResponseBody):
    """How the version writes calls of tools, and its reasoning. A null: as the base model does. `chat_digest` is the
    SHA-256 of the chat template and the ends of answers that it brings; a null: they are the base model's. `alora`:
    what becomes of a prompt without the invocation of an activated LoRA; a null: it is refused."""

    tool_format: ToolFormatName | None
    reasoning_format: ReasoningFormatName | None
    chat_digest: str | None
    alora: WithoutInvocation | None


class ServingChoice(RequestBody):
    """How an imported version writes calls of tools, and its reasoning. A null: as the base model does. `alora`: what
    becomes of a prompt without the invocation of an activated LoRA; a null: it is refused."""

    tool_format: ToolFormatName | None = None
    reasoning_format: ReasoningFormatName | None = None
    alora: Literal["refuse"] | WithoutInvocation | None = None


class VersionImport(RequestBody):
    """`source` is file:///DIR, s3://BUCKET/PREFIX or hf://ORG/NAME@COMMIT."""

    source: Annotated[str, Field(min_length=1, max_length=MAX_URL_CHARS)]
    serving: ServingChoice = ServingChoice()


_Tags = Annotated[
    list[Annotated[str, Field(json_schema_extra={"pattern": described.TAG})]],
    Field(json_schema_extra={"maxItems": MAX_TAGS, "uniqueItems": True}),
]


class AdapterChange(RequestBody):
    """`tags` take the place of those that the adapter has: at most 8 of at most 32 characters each. `add` and `remove`
    leave its other tags as they are, and go without `tags`."""

    model_config = ConfigDict(json_schema_extra=described.whole_or_changes)

    tags: _Tags = Field(default_factory=list)
    add: _Tags = Field(default_factory=list)
    remove: _Tags = Field(default_factory=list)

    @model_validator(mode="after")
    def _one_way(self) -> AdapterChange:
        if ("tags" in self.model_fields_set) == bool(self.model_fields_set & {"add", "remove"}):
            raise ValueError("give either 'tags', or 'add' and 'remove' or one of these")
        return self


class AdapterQuery(PageQuery):
    """`search`: a part of the adapters' names."""

    search: Annotated[
        Annotated[str, Field(pattern=described.NAME_PART)] | None,
        OmittedNull(),
    ] = None


class PushQuery(QueryParameters):
    """`wait`: whether the answer waits for the check of the version's numbers. `tags`: those that the adapter gets
    beside its own, with a comma between them."""

    wait: bool = True
    tags: Annotated[str | None, WithJsonSchema(described.TAG_LIST)] = None

    @property
    def tag_list(self) -> list[str]:
        return [] if self.tags is None else self.tags.split(",")


class VersionHead(ResponseBody):
    """The head of a version that classifies: a logit for each of `labels`, of the prompt's last token or of every
    token. `problem_type` says what they mean: logits of a softmax, one of a sigmoid each, or the numbers themselves.
    `pad_id`: the last token that is another is pooled. `prompt`: the instruction before the query of a pair."""

    task: HeadTask
    labels: list[str]
    problem_type: ProblemType
    pad_id: int | None
    prompt: str | None


class VersionEmbedding(ResponseBody):
    """The vectors that the version was trained for. `dimensions`: the first numbers that are kept; a null: all."""

    pooling: VectorPooling
    normalize: bool
    dimensions: int | None


class Version(ResponseBody):
    """`bytes` is the size of the upload's files; `base_fingerprint` names the base that it was checked against.
    `invocation`: the token ids that activate it (aLoRA); empty where it acts on every position. `head`: of one that
    classifies. `embedding`: the vectors that it was trained for, where its upload says so. `checked`: the check that
    its series wanted before it serves, of its structure alone or of its numbers too; a null: it is of no series.
    `durable`: its bytes are on the disk, and outlive a crash."""

    name: str
    version: str
    digest: str
    state: VersionState
    rank: int
    targets: list[str]
    bytes: int
    pinned: bool
    base_fingerprint: str
    created_at: Timestamp
    serving: VersionServing
    invocation: list[int]
    head: VersionHead | None
    embedding: VersionEmbedding | None
    checked: Checked | None
    durable: bool
    report: dict[str, Any] | None


class VersionPage(ResponseBody):
    data: list[Version]
    next_cursor: str | None


class Pin(ResponseBody):
    name: str
    version: str
    pinned: bool


class Adapter(ResponseBody):
    """`latest_version` is the newest, even if it was deleted; `num_versions` counts those that were not. `release` is
    null where nothing is released."""

    name: str
    tags: list[str]
    num_versions: int
    latest_version: str
    release: Release | None
    created_at: Timestamp


class AdapterPage(ResponseBody):
    data: list[Adapter]
    next_cursor: str | None


class OverviewQuery(PageQuery):
    """`state` is of the newest living version or of one that takes traffic; `base` says whether that was made for the
    base that is served; `search` is a part of the adapters' names, `tag` one of their tags. `hours`: what was asked in
    the last hours is counted; with 0 nothing is. `min_errors` and `min_error_rate` (a part of the requests, 0 to 1) are
    of these hours.
    """

    tenant: Annotated[Annotated[str, Field(pattern=described.TENANT_ID)] | None, OmittedNull()] = None
    state: Annotated[Literal["validating", "ready", "incompatible", "corrupt"] | None, OmittedNull()] = None
    release: Annotated[ReleaseFilter | None, OmittedNull()] = None
    base: Annotated[BaseFilter | None, OmittedNull()] = None
    search: Annotated[Annotated[str, Field(pattern=described.NAME_PART)] | None, OmittedNull()] = None
    tag: Annotated[Annotated[str, Field(pattern=described.TAG)] | None, OmittedNull()] = None
    sort: Sort = "name"
    order: Literal["asc", "desc"] = "asc"
    hours: Annotated[int, Field(ge=0, le=24)] = 1
    min_errors: Annotated[int, Field(ge=0, le=2**53)] = 0
    min_error_rate: Annotated[float, Field(ge=0, le=1)] = 0.0


class OverviewTarget(ResponseBody):
    version: str
    weight: int
    state: VersionState


class OverviewRow(ResponseBody):
    """One adapter. `version` is the newest living one, `state` its own, and `compatible` says whether it was made for
    the base that is served; `bytes` and `pinned` count all living versions. `released` are the versions that take the
    traffic; `run` is the state of the release's guard or schedule. `requests`, `errors` (those that the server failed),
    `tokens`, the median `first_token_seconds` and `last_used_at` are of the hours asked for. `residency` names the
    tiers that hold the newest version, the fastest first; null while the engine is away."""

    tenant: str
    name: str
    tags: list[str]
    version: str
    state: VersionState
    compatible: bool
    num_versions: int
    bytes: int
    pinned: int
    created_at: Timestamp
    released: list[OverviewTarget]
    run: RunStatus | None
    requests: int
    errors: int
    tokens: int
    first_token_seconds: float | None
    last_used_at: Timestamp | None
    residency: list[str] | None


class OverviewTotals(ResponseBody):
    """Sums over all pages. `states` counts adapters by the state of their newest living version."""

    adapters: int
    states: dict[str, int]
    bytes: int
    requests: int
    errors: int
    tokens: int


class OverviewPage(ResponseBody):
    data: list[OverviewRow]
    next_cursor: str | None
    totals: OverviewTotals
