"""Reading an adapter from the model hub, at a commit. Endpoint and token are those of huggingface_hub's settings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from urllib.parse import urljoin, urlsplit

import httpx

from loraplex.adapters.sources.errors import SourceNotAllowed, SourceNotFound, SourceUnavailable
from loraplex.adapters.sources.remote import RemoteFile, find_remote, write_remote
from loraplex.adapters.sources.urls import Source
from loraplex.adapters.store.artifact_store import Staging

MAX_REDIRECTS = 4
TIMEOUT_S = 30.0
FILE_HOSTS = (".hf.co",)
"""Hosts that the public hub keeps large files on, by the end of their names."""
_COMMIT = "x-repo-commit"


def copy_from_hub(
    source: Source,
    staging: Staging,
    *,
    max_bytes: int,
    reserve: Callable[[int], None],
    endpoint: str | None = None,
) -> None:
    """Copy an adapter's files of a repository at a commit into `staging`. The token is sent to the hub alone; a
    redirect leads to the hub or, from the public one, to the hosts of its files. `endpoint` is another hub's than the
    settings'.

    Raises SourceNotAllowed for a redirect elsewhere, SourceUnavailable, and what `find_remote` and `write_remote`
    raise.
    """
    from huggingface_hub import constants, get_token

    hub = (endpoint or constants.ENDPOINT).rstrip("/")
    is_public = endpoint is None and hub == constants._HF_DEFAULT_ENDPOINT
    token = get_token() if endpoint is None else None
    name = "/".join((source.authority, *source.root, *source.parts))
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(httpx.Client(timeout=TIMEOUT_S, follow_redirects=False))

        def found(file: str) -> RemoteFile:
            url = f"{hub}/{name}/resolve/{source.revision}/{file}"
            return _found(stack, client, url, hub, token, is_public, source)

        write_remote(find_remote(found), staging, max_bytes=max_bytes, reserve=reserve)


def _found(
    stack: contextlib.ExitStack,
    client: httpx.Client,
    url: str,
    hub: str,
    token: str | None,
    is_public: bool,
    source: Source,
) -> RemoteFile:
    what = url.rpartition("/")[2]
    for _ in range(MAX_REDIRECTS):
        headers = {"Accept-Encoding": "identity"}
        if token is not None and _origin(url) == _origin(hub):
            headers["Authorization"] = f"Bearer {token}"
        try:
            response = stack.enter_context(client.stream("GET", url, headers=headers))
        except httpx.HTTPError as error:
            raise SourceUnavailable(
                f"{what} cannot be read from the hub now ({type(error).__name__})."
            ) from error
        if response.headers.get(_COMMIT, source.revision) != source.revision:
            raise SourceUnavailable(f"The hub answered with another commit of {what} than was asked for.")
        if not response.is_redirect:
            return _answered(response, what)
        url = urljoin(url, response.headers.get("location", ""))
        _check_redirect(url, hub, is_public)
    raise SourceUnavailable(f"The hub redirects {what} again and again.")


def _answered(response: httpx.Response, what: str) -> RemoteFile:
    if response.status_code in (401, 403, 404):
        raise SourceNotFound(f"The hub has no file {what} at this commit that this server can read.")
    length = response.headers.get("content-length", "")
    if response.status_code != 200 or not (length.isascii() and length.isdigit()):
        raise SourceUnavailable(f"The hub answered {response.status_code} for {what}; try again later.")
    return RemoteFile(int(length), _chunks(response, what))


def _chunks(response: httpx.Response, what: str) -> Iterator[bytes]:
    try:
        # As they come: the deadline is looked at with each.
        yield from response.iter_raw()
    except httpx.HTTPError as error:
        raise SourceUnavailable(f"{what} broke off ({type(error).__name__}); try again.") from error


def _check_redirect(url: str, hub: str, is_public: bool) -> None:
    if _origin(url) == _origin(hub):
        return
    to = urlsplit(url)
    is_file_host = (
        to.scheme == "https" and to.port in (None, 443) and (to.hostname or "").endswith(FILE_HOSTS)
    )
    if not is_public or not is_file_host or to.username is not None:
        raise SourceNotAllowed("The hub redirects to another host, which is not read.")


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc
