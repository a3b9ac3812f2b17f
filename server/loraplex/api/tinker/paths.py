"""`tinker://` paths and sampling sessions, and the models that they name.

`tinker://NAME/sampler_weights/VERSION` is the adapter NAME of the key's tenant: its version v17, the one whose digest
begins with these digits, or `latest`, the one that the name's release gives."""

from __future__ import annotations

import base64
import binascii
import re
import secrets

from loraplex.api.errors import ApiError, invalid

MAX_PATH_CHARS = 512
MAX_SESSION_CHARS = 1024
LATEST = "latest"
_PATH = re.compile(
    r"tinker://([a-z0-9][a-z0-9._-]{0,62})/sampler_weights/(v[1-9][0-9]{0,9}|[0-9a-f]{12,64}|latest)"
)
_SESSION = re.compile(r"sampling-[A-Za-z0-9_-]{11}-([A-Za-z0-9_-]{1,900})")


def model_of_path(path: str) -> str:
    """The `model` of a path: `NAME@VERSION`, or `NAME` for the latest. Raises ApiError (400)."""
    found = _PATH.fullmatch(path)
    if found is None:
        why = "must be tinker://NAME/sampler_weights/VERSION, VERSION such as v17, a digest's first digits, or latest"
        raise invalid("model_path", f"Invalid value for 'model_path': {why}.")
    name, version = found.groups()
    return name if version == LATEST else f"{name}@{version}"


def path_of_model(model: str) -> str:
    """The path of `NAME@VERSION`, or of `NAME`."""
    name, _, version = model.partition("@")
    return f"tinker://{name}/sampler_weights/{version or LATEST}"


def new_session(model: str) -> str:
    """An id of a sampling session that samples from `model`. It holds the model's name, so that nothing is kept for it;
    who may use the model is asked with each sample."""
    named = base64.urlsafe_b64encode(model.encode()).decode().rstrip("=")
    return f"sampling-{secrets.token_urlsafe(8)}-{named}"


def model_of_session(session_id: str) -> str:
    """The model that a sampling session samples from. Raises ApiError (400 or 404)."""
    found = _SESSION.fullmatch(session_id)
    try:
        named = "" if found is None else found[1]
        model = base64.b64decode(named + "=" * (-len(named) % 4), b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        model = ""
    if not 1 <= len(model) <= MAX_PATH_CHARS:
        raise ApiError("model_not_found", "There is no such sampling session.", param="sampling_session_id")
    return model
