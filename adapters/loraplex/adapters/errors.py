"""The root of the exception tree, and what the adapter layer raises."""

from __future__ import annotations

from typing import Any, Literal

RefusalCode = Literal[
    "name_reserved",
    "not_safetensors",
    "bad_archive",
    "config_invalid",
    "base_mismatch",
    "unsupported_feature",
    "rank_exceeds_max",
    "shape_mismatch",
    "missing_tensor",
    "unexpected_tensor",
    "no_effect",
    "non_finite",
    "numerical_mismatch",
    "numerical_crash",
    "agreement_missing",
    "agreement_exceeded",
    "agreement_failed",
    "too_large",
    "quota_exceeded",
]


class LoraplexError(Exception):
    """Everything that Loraplex raises on purpose. `code` is machine-readable, the message is for people."""

    code: str = "internal_error"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class AdapterRefused(LoraplexError):
    """An upload that will not be served. `feature` names what is not supported (for unsupported_feature);
    `report` is what the admission found up to then. `faults` are all reasons, each a refusal of its own: itself where
    there is one; code and feature are those of the first."""

    def __init__(
        self,
        code: RefusalCode,
        message: str,
        *,
        feature: str | None = None,
        report: dict[str, Any] | None = None,
        faults: tuple[AdapterRefused, ...] = (),
    ) -> None:
        super().__init__(message)
        self.code: RefusalCode = code
        self.feature = feature
        self.report = report
        self._faults = faults

    @property
    def faults(self) -> tuple[AdapterRefused, ...]:
        return self._faults or (self,)


class ArtifactMissing(LoraplexError):
    """The store holds no artifact of that digest."""

    code = "adapter_unavailable"


class ArtifactCorrupt(LoraplexError):
    """An artifact's bytes are not those that its digest names."""

    code = "adapter_unavailable"


class StoreFull(LoraplexError):
    """The disk has no room for the upload; nothing of it was kept."""

    code = "storage_full"


class ArtifactUnreadable(LoraplexError):
    """An artifact's bytes cannot be read at the moment; whether they are whole is unknown."""

    code = "adapter_unavailable"


class LoadAbandoned(LoraplexError):
    """The load was given up by its caller."""

    code = "adapter_unavailable"


class StoreFailed(LoraplexError):
    """The disk failed under an upload; nothing of it was kept."""

    code = "storage_unavailable"
    retry_after_s = 30.0


class BaseModelInvalid(LoraplexError):
    """The base model's directory is not a checkpoint that can be read."""

    code = "base_model_invalid"
