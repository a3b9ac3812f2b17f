"""Releases as the control plane returns them to the HTTP layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

Sticky = Literal["user", "key", "none"]
MAX_RELEASE_WEIGHT = 1_000_000
"""Largest weight of one target of a release."""


@dataclass(frozen=True, slots=True)
class ReleaseTarget:
    version: str
    weight: int


ActorKind = Literal["admin", "key", "local", "guard"]
ReleaseOrigin = Literal["upload", "set", "promote", "rollback", "delete", "step"]
RunStatus = Literal["running", "paused", "promoted", "rolled_back"]


@dataclass(frozen=True, slots=True)
class ShadowPlan:
    """The version that answers a share of a release's requests too, unseen. `sample`: the share, above 0, up to 1.
    `keep_texts`: both answers are kept for a while."""

    version: str
    sample: float
    keep_texts: bool = False


@dataclass(frozen=True, slots=True)
class ShadowInfo:
    """Sums over the samples of a release's shadow version."""

    version: str
    """The shadow version."""
    began: int
    """The revision of the release since which samples count."""
    samples: int = 0
    """Samples that were compared."""
    dropped: int = 0
    """Samples that were not run to their end."""
    failed: int = 0
    """Samples that ended with an error."""
    exact: int = 0
    """Compared samples whose tokens are all the same."""
    diverged_at: int = 0
    """The sum of the indices (from 0) of the first different token, over the samples that are not exact."""
    live_tokens: int = 0
    """Tokens of the answers that callers got."""
    shadow_tokens: int = 0
    """Tokens of the shadow's answers."""
    scored: int = 0
    """Tokens of the callers' answers that have log probabilities under both versions."""
    live_logprob: float = 0.0
    """The sum of their log probabilities under the version that answered."""
    shadow_logprob: float = 0.0
    """The sum of their log probabilities under the shadow."""


@dataclass(frozen=True, slots=True)
class ShadowTexts:
    """The texts of one sample: the prompt, the answer that the caller got, and the shadow's."""

    id: str
    version: str
    at: datetime
    prompt: str
    answer: str
    shadow_answer: str


@dataclass(frozen=True, slots=True)
class ReleasePlan:
    """The acts of a release by itself: `guard` and `schedule` are checked JSON, as `loraplex.lifecycle.release_guard`
    reads it."""

    guard: Mapping[str, Any] | None = None
    schedule: Sequence[Mapping[str, Any]] | None = None
    shadow: ShadowPlan | None = None


NO_PLAN = ReleasePlan()


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The state of a release with a guard or a schedule."""

    began: int
    """The revision with which the run began."""
    revision: int
    """The revision in force."""
    status: RunStatus
    """The state that the release's answer has."""
    step: int
    """The step of the schedule, from 0."""
    since: float
    """When the step began, in seconds since the epoch."""
    control: int
    """The number of the version that is compared with."""
    candidate: int
    """The number of the new version."""
    reason: str | None = None
    """Why it was rolled back."""


@dataclass(frozen=True, slots=True)
class ReleaseInfo:
    """The versions that a bare name means, in parts of the weights' sum. Fields are None where they were not
    recorded."""

    tenant_id: str
    """The owner."""
    name: str
    """The adapter's name."""
    revision: int
    """Grows by one with each change."""
    targets: tuple[ReleaseTarget, ...]
    """The versions and their weights."""
    sticky: Sticky
    """The property by which a caller stays on one version."""
    created_at: datetime
    """When the revision was made."""
    origin: ReleaseOrigin | None = None
    """The act that made the revision: `upload` is of a name's first version, `delete` of its last one."""
    restores: int | None = None
    """The earlier revision that a rollback restores, which is itself no rollback."""
    actor: ActorKind | None = None
    """The kind of caller who made the revision, as in the audit log."""
    actor_key_id: str | None = None
    """The key of that caller."""
    plan: ReleasePlan = NO_PLAN
    """The guard, schedule and shadow of the release."""
    began: int | None = None
    """The revision whose schedule a `step` follows."""
    reason: str | None = None
    """Why the guard went back."""
    run: RunInfo | None = None
    """None where nothing watches the release."""


@dataclass(frozen=True, slots=True)
class SkippedRevision:
    """An earlier release that a rollback passed over; `reason` completes a sentence, for example "v2 is deleted"."""

    revision: int
    reason: str


@dataclass(frozen=True, slots=True)
class RollbackInfo:
    """The release that is in force after a rollback."""

    release: ReleaseInfo
    skipped: tuple[SkippedRevision, ...]
