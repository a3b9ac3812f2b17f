"""Errors of the control plane. Each has a machine-readable `code`; the HTTP layers map it to an answer."""

from __future__ import annotations

from loraplex.adapters.errors import AdapterRefused, LoraplexError, RefusalCode
from loraplex.control.types import ReachedLimit, VersionInfo, Windows


class ControlError(LoraplexError):
    """`param` names the field at fault, where there is one."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidValue(ControlError):
    code = "invalid_value"


class Conflict(ControlError):
    """A conflict with existing data."""

    code = "conflict"


class PreconditionFailed(ControlError):
    """The caller's If-Match names another state than the one there is; nothing was changed."""

    code = "precondition_failed"


class TenantIdRetired(ControlError):
    """A tenant of this id was deleted; bills and the audit log still name it."""

    code = "tenant_id_retired"


class InvalidKey(ControlError):
    """Missing, unknown, expired and revoked keys answer alike."""

    code = "invalid_api_key"


class TenantSuspended(ControlError):
    """The key is valid, and its tenant is suspended."""

    code = "tenant_suspended"

    def __init__(self) -> None:
        super().__init__("This key's tenant is suspended. The server's operator can resume it.")


class SecretUnusable(ControlError):
    """A secret of this installation is empty or damaged; it does not start."""

    code = "secret_unusable"


class DatabaseUnavailable(ControlError):
    """The database cannot be reached. A transaction was committed or not; none is half done."""

    code = "database_unavailable"
    retry_after_s = 5.0

    def __init__(self) -> None:
        super().__init__("The database cannot be reached now; try again in a few seconds.")


class DatabaseDenied(ControlError):
    """The database's user may not do this. The log says what it lacks."""

    code = "database_unavailable"
    retry_after_s = 30.0

    def __init__(self) -> None:
        super().__init__(
            "The database does not let this server do that; its operator finds the reason in the log."
        )


class DatabaseBusy(ControlError):
    """The database answers, but the call did not get its turn in time. Nothing was changed."""

    code = "server_overloaded"
    retry_after_s = 2.0

    def __init__(self) -> None:
        super().__init__("Too much is being written at the moment; try again in a few seconds.")


class QuotaTaken(ControlError):
    """Other uploads of the tenant, which have not ended, take what its quota leaves. This one was not kept."""

    code = "server_overloaded"
    retry_after_s = 10.0


class PepperChanged(ControlError):
    """The keys in the database were hashed under another pepper than this server's."""

    code = "pepper_changed"


class TenantNotFound(ControlError):
    code = "tenant_not_found"


class KeyNotFound(ControlError):
    code = "key_not_found"


class AdapterNotFound(ControlError):
    code = "adapter_not_found"


class VersionNotFound(ControlError):
    code = "version_not_found"


class FileNotFound(ControlError):
    code = "file_not_found"


class BatchNotFound(ControlError):
    code = "batch_not_found"


class SeriesNotFound(ControlError):
    code = "series_not_found"


class NotForTraining(ControlError):
    """The name is a series, and the caller's key may not push to one."""

    code = "insufficient_scope"


class ReleaseNotFound(ControlError):
    code = "release_not_found"


class ModelNotFound(ControlError):
    """Unknown names and other tenants' names answer alike."""

    code = "model_not_found"


class ModelNotAllowed(ControlError):
    code = "model_not_allowed"


class AdapterUnavailable(ControlError):
    """The version exists and cannot be served: another base, damaged bytes, or numbers that are not checked yet."""

    code = "adapter_unavailable"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float = 60.0) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class VersionRejected(AdapterRefused):
    """The check of its numbers rejected the version. The reason is in its report, and here."""

    def __init__(self, info: VersionInfo) -> None:
        refusal = info.report["refusal"]
        super().__init__(
            refusal["code"],
            f"{info.name}@{info.version} was rejected: {refusal['message']}.",
            report=info.report,
        )
        self.version = info.version


class SameBytesRefused(AdapterRefused):
    """Bytes that a version has came with log probabilities that it does not agree with. `info` has the figures of that
    in its report; the version stays as it is."""

    def __init__(self, info: VersionInfo, code: RefusalCode, reason: str) -> None:
        super().__init__(
            code,
            f"The bytes are those of {info.name}@{info.version}, which stays as it is: {reason}.",
            report=info.report,
        )
        self.version = info.version


class AgreementMissing(AdapterRefused):
    """The series holds its versions to the trainer's log probabilities, and the push came without them."""

    def __init__(self, name: str, within: float) -> None:
        super().__init__(
            "agreement_missing",
            f"The series '{name}' has agree_within {within:g}, so each version comes with what its trainer computed: "
            "push a multipart form to …/series/versions with the parts adapter_model.safetensors and agreement, which "
            'is {"tokens": [[id, …], …], "logprobs": [[…], …]}.',
        )
        self.param = "agreement"


class NumbersUnchecked(ControlError):
    """The version is stored and validating: there is no verdict on its numbers yet. The server goes on trying."""

    code = "numbers_unchecked"
    retry_after_s = 10.0
    _told = (
        "is stored, and its numbers are not checked yet: {}. The server goes on trying, and the version takes no "
        "traffic before. Look at its state, or send the same files again to wait for it."
    )

    def __init__(self, info: VersionInfo, reason: str) -> None:
        super().__init__(f"{info.name}@{info.version} {self._told.format(reason.rstrip('.'))}")
        self.version = info.version


class AgreementUnchecked(NumbersUnchecked):
    """Bytes that a version has came with log probabilities that could not be compared in time. The version stays as it
    is, and the server does not go on trying."""

    _told = (
        "has these bytes and stays as it is, and the log probabilities that came with them are not compared with its "
        "own: {}. Push the same again."
    )


class RateLimited(ControlError):
    """A limit is reached; nothing more was consumed. `retry_after_s` is when the same would pass. `is_own`: the one
    that is told is the caller's, of its key or tenant, and not the server's, which others reach too. `reached` is that
    limit, None where what is left of a budget is held for other requests."""

    code = "rate_limit_exceeded"

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: float,
        windows: Windows | None = None,
        is_own: bool = True,
        reached: ReachedLimit | None = None,
    ) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.reached = reached
        self.is_own = is_own
        self.windows: Windows = windows or {}


class QuotaSpent(ControlError):
    """A token budget, `reached`, is spent; nothing was consumed, and trying again before its next period does not
    help."""

    code = "insufficient_quota"

    def __init__(self, message: str, *, reached: ReachedLimit | None = None) -> None:
        super().__init__(message)
        self.reached = reached


class NeverFits(ControlError):
    """More was asked for than a limit ever allows; waiting would not help."""

    code = "invalid_value"


class LimitsNotShared(ControlError):
    """The shared limiter cannot be used; the server does not start."""

    code = "limits_not_shared"


class LimitsUnavailable(ControlError):
    """The shared limiter does not answer, and this server may not decide by itself, or its own share
    of a limit is spent (`reached`). Nothing was consumed. `retry_after_s` is when the share allows it."""

    code = "limits_unavailable"

    def __init__(self, reached: str = "", *, retry_after_s: float) -> None:
        own = (
            f", and by this server's own share of them: {reached[0].lower()}{reached[1:]}" if reached else "."
        )
        super().__init__(f"The limits of all servers together cannot be looked up now{own} Try again later.")
        self.retry_after_s = retry_after_s
