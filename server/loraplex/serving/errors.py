"""Errors of the serving layer. The HTTP layers map these to answers by `code`; `retry_after_s` (where set) is
the least time after which trying again makes sense."""

from __future__ import annotations

from loraplex.adapters.errors import LoraplexError


class ServingError(LoraplexError):
    """The root of this layer's errors."""

    retry_after_s: float | None = None


class EngineUnavailable(ServingError):
    """No engine can take the request now: it is starting, being replaced, or has failed for good (503)."""

    code = "engine_restarting"
    retry_after_s = 2.0


class EngineLost(EngineUnavailable):
    """The engine process ended while it had the request (503)."""


class EngineDraining(EngineUnavailable):
    """The engine finishes what runs and takes nothing new (503)."""

    code = "draining"


class EngineOverloaded(ServingError):
    """The client's bound on requests in flight is reached (503). `is_own`: by the caller's own requests, which are as
    many as its share; else by those of others."""

    code = "server_overloaded"
    retry_after_s = 1.0

    def __init__(self, message: str, *, is_own: bool = False) -> None:
        super().__init__(message)
        self.is_own = is_own


class ScoringRefused(ServingError):
    """The log probabilities of these tokens under this version are refused each time (4xx). `code` and `param` are
    those of a completion that is refused so."""

    def __init__(self, code: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class EngineStartError(ServingError):
    """The engine could not be started; the message says why in one line."""

    code = "engine_restarting"


class TemplateError(ServingError):
    """The messages cannot be put into the model's chat template (400). `param` is the field at fault."""

    code = "invalid_value"
    param = "messages"


class TextTooLong(ServingError):
    """The text is longer than the model's context can possibly hold; it was not tokenised (400)."""

    code = "context_length_exceeded"


class TokenizerUnsupported(ServingError):
    """The model directory's tokenizer is missing, or of a kind that this server does not decode."""

    code = "invalid_value"


class GrammarRefused(ServingError):
    """The text of an answer cannot be held to this grammar or schema (400). `path` is where in the schema, relative to
    it, for example "properties.age.minimum"; empty: all of it."""

    code = "invalid_value"

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class WorkTimeSpent(ServingError):
    """This tenant's jobs have taken more processing time than it may use (429)."""

    code = "rate_limit_exceeded"
    is_own = True

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class WorkUnavailable(ServingError):
    """No job can be done now: too many wait (`is_full`), or the process that does them was lost (503). `is_own`: the
    caller's own requests wait, as many as its share."""

    code = "server_overloaded"
    retry_after_s = 1.0

    def __init__(self, message: str, *, is_own: bool = False, is_full: bool = False) -> None:
        super().__init__(message)
        self.is_own = is_own
        self.is_full = is_full


class GrammarTimeSpent(WorkTimeSpent):
    """The tenant's share of CPU time for grammars is spent."""


class GrammarsUnavailable(WorkUnavailable):
    """No grammar can be checked now."""


class TemplateTimeSpent(WorkTimeSpent):
    """The tenant's share of CPU time for versions' own chat templates is spent."""


class TemplatesUnavailable(WorkUnavailable):
    """No version's own chat template can be rendered now."""
