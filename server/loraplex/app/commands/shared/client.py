"""A small client of the server's own HTTP interface, whose failures are sentences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from loraplex.app.commands.shared.errors import CommandFailed
from loraplex.app.commands.shared.report import report_fields

if TYPE_CHECKING:  # a help page or a completion asks no server
    import httpx

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 600.0
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


def http_timeout(answer_s: float = ANSWER_TIMEOUT_S) -> httpx.Timeout:
    import httpx

    return httpx.Timeout(answer_s, connect=CONNECT_TIMEOUT_S)


def find_admin_token(given: str | None, data_dir: Path | None) -> str:
    """The token that was given, else the one that the server wrote into `data_dir`. Raises CommandFailed."""
    if given:
        return given
    if data_dir is None:
        raise CommandFailed(
            "no admin token: give --admin-token, set LORAPLEX_ADMIN_TOKEN, or give the server's --data-dir. A tenant's "
            "key with the scope works too: --admin-token lpx_... --admin-url ADDRESS_OF_THE_DATA_PORT."
        )
    path = data_dir / "admin-token"
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise CommandFailed(f"the admin token cannot be read from {path}: {reason}.") from error
    if not token:
        raise CommandFailed(f"{path} is empty; give --admin-token.")
    return token


def http_client(url: str, secret: str) -> httpx.Client:
    """Raises CommandFailed for what is no URL or no token."""
    import httpx

    return httpx.Client(**http_options(url, secret))


def http_options(url: str, secret: str) -> dict[str, Any]:
    """Keyword arguments of an httpx client of this server. Raises CommandFailed."""
    host = _checked_host(url)
    if not secret.isascii() or not secret.isprintable():
        raise CommandFailed("the token holds characters that no token has; was it copied whole?")
    return {
        "base_url": url,
        "headers": {"authorization": f"Bearer {secret}"},
        "timeout": http_timeout(),
        # A proxy from the environment cannot reach this machine's own loopback.
        "trust_env": host not in LOOPBACK,
    }


def _checked_host(url: str) -> str:
    import httpx

    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise CommandFailed(f"{url!r} is no URL: {error}.") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise CommandFailed(f"{url!r} is no URL; it should look like http://127.0.0.1:8001.")
    return parsed.host


def unreachable(url: str, error: httpx.HTTPError, option: str) -> CommandFailed:
    """The sentence for a server that could not be talked to."""
    import httpx

    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return CommandFailed(
            f"no server answers at {url}: start one with 'loraplex serve', or give {option}."
        )
    if isinstance(error, httpx.TimeoutException):
        return CommandFailed(f"{url} took too long to answer; look at the server's log.")
    reason = str(error) or type(error).__name__
    return CommandFailed(f"the connection to {url} broke ({reason}); look at the server's log.")


class AdminClient:
    """The admin plane, or the data port with a tenant's own key."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url
        self._client = http_client(url, token)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def call(self, method: str, path: str, **options: Any) -> Any:
        """The decoded answer (None where there is none). `path` is below /admin/v1. Raises CommandFailed."""
        return self.send(method, path, **options)[1]

    def send(self, method: str, path: str, **options: Any) -> tuple[int, Any]:
        """The same, with the status."""
        import httpx

        try:
            request = self._client.build_request(method, f"/admin/v1{path}", **options)
        except UnicodeEncodeError:
            raise  # as everywhere in a command
        except ValueError as error:
            raise CommandFailed("a number is not finite; give one that is.") from error
        try:
            response = self._client.send(request)
        except httpx.HTTPError as error:
            raise unreachable(self.url, error, "--admin-url") from error
        if response.status_code == 204 or (response.is_success and not response.content):
            return response.status_code, None
        body = _decoded(self.url, response)
        if not response.is_success:
            raise refused(response.status_code, body)
        return response.status_code, body

    @contextmanager
    def stream(self, path: str) -> Iterator[httpx.Response]:
        """An answer whose body the block reads. Raises CommandFailed, also where it breaks off."""
        import httpx

        try:
            with self._client.stream("GET", f"/admin/v1{path}") as response:
                if not response.is_success:
                    response.read()
                    raise refused(response.status_code, _decoded(self.url, response))
                yield response
        except httpx.HTTPError as error:
            raise unreachable(self.url, error, "--admin-url") from error

    def pages(self, path: str, **query: str) -> Iterator[dict[str, Any]]:
        """Every row of a paged list."""
        from loraplex.control.rules import MAX_PAGE

        cursor: str | None = None
        while True:
            params = query | {"limit": str(MAX_PAGE)} | ({"cursor": cursor} if cursor else {})
            page = self.call("GET", path, params=params)
            yield from page["data"]
            cursor = page.get("next_cursor")
            if not cursor:
                return


def _decoded(url: str, response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError as error:
        raise CommandFailed(
            f"{url} answered {response.status_code} with something that is not JSON; is it Loraplex's admin plane?"
        ) from error


def refused(status: int, body: Any, key_option: str = "--admin-token") -> CommandFailed:
    """The sentence for a problem document (RFC 9457), or for the data plane's error object. `key_option` is where
    the user gives the secret that a 401 is about."""
    if not isinstance(body, dict):
        return CommandFailed(f"the server answered {status}.", body=body)
    error = body.get("error")
    if isinstance(error, dict):
        body = {"code": error.get("code"), "detail": error.get("message")}
    code = body.get("code")
    message = str(body.get("detail") or body.get("title") or f"the server answered {status}")
    if code:
        message = f"{message} [{code}]"
    if status == 401:
        message += f" Give one that is valid with {key_option}."
    if code == "not_found":  # a path, not what a path names
        message += (
            " Give the admin port with --admin-url; the data port has a tenant's own routes alone."
            if key_option == "--admin-token"
            else " Give the data port with --url."
        )
    return CommandFailed(message, details=_report_lines(body.get("report")), body=body)


def _report_lines(report: Any) -> tuple[str, ...]:
    """The findings of an admission report, a line each."""
    return tuple(
        f"{name}: {line[:300]}" for name, text in report_fields(report).items() for line in text.splitlines()
    )
