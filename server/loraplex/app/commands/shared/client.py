"""A small client of the server's own HTTP interface, whose failures are sentences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from loraplex.app.commands.shared.access import Access
from loraplex.app.commands.shared.errors import CommandFailed, WrongUsage
from loraplex.app.commands.shared.report import report_fields

if TYPE_CHECKING:  # a help page or a completion asks no server
    import httpx

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 600.0
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


def http_timeout(answer_s: float = ANSWER_TIMEOUT_S) -> httpx.Timeout:
    import httpx

    return httpx.Timeout(answer_s, connect=CONNECT_TIMEOUT_S)


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
        raise CommandFailed(f"'{url}' is no URL: {error}.") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        meant = "" if "://" in url else f", such as http://{url or 'HOST:PORT'}"
        raise CommandFailed(f"'{url}' is no URL: it begins with http:// or https:// and has a host{meant}.")
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

    def __init__(self, access: Access) -> None:
        self.access = access
        self.url = access.url
        self._client = http_client(access.url, access.secret)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def caller(self) -> Any:
        """Whose secret this is, as the server says. Raises CommandFailed."""
        return self.call("GET", "/caller")

    def tenant(self, given: str | None) -> str:
        """The tenant that was given, else the key's. Raises WrongUsage for an admin token, which is no tenant's."""
        if given is not None:
            return given
        if self.access.is_key:
            return str(self.caller()["tenant"])
        also = ""
        if self.access.also:
            also = f"; {self.access.also} is not used beside it: take one of them away"
        raise WrongUsage(
            f"Missing option '--tenant' / '-t': the admin token of {self.access.secret_from} is no tenant's{also}"
        )

    def tenant_option(self, tenant: str) -> str:
        """Arguments that name the tenant, for a command that is shown to the user."""
        return "" if self.access.is_key else f" --tenant {tenant}"

    def require_operator(self, what: str) -> None:
        """Raises CommandFailed where the secret is a tenant's key."""
        if self.access.is_key:
            raise CommandFailed(
                f"{what} needs the admin token, and {self.access.secret_from} is a tenant's key: keys are made and "
                "changed by operators alone. 'loraplex key show' shows this one."
            )

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
            raise unreachable(self.url, error, self.access.url_option) from error
        if response.status_code == 204 or (response.is_success and not response.content):
            return response.status_code, None
        body = decoded(self.url, response)
        if not response.is_success:
            raise self._refused(response.status_code, body)
        return response.status_code, body

    @contextmanager
    def stream(self, path: str) -> Iterator[httpx.Response]:
        """An answer whose body the block reads. Raises CommandFailed, also where it breaks off."""
        import httpx

        try:
            with self._client.stream("GET", f"/admin/v1{path}") as response:
                if not response.is_success:
                    response.read()
                    raise self._refused(response.status_code, decoded(self.url, response))
                yield response
        except httpx.HTTPError as error:
            raise unreachable(self.url, error, self.access.url_option) from error

    def _refused(self, status: int, body: Any) -> CommandFailed:
        """The server's sentence, and what it cannot know: where the secret comes from."""
        access = self.access
        failed = refused(status, body, "--api-key" if access.url_option == "--url" else "--admin-token")
        code = body.get("code") if isinstance(body, dict) else None
        if status == 401 and not access.secret_from.startswith("--"):
            failed.message += f" This one is from {access.secret_from}."
        if code == "insufficient_scope" and "scope" in body:
            caller = self.caller()
            scopes = " ".join(f"--scope {scope}" for scope in (*caller["key"]["scopes"], body["scope"]))
            update = f"loraplex key update {caller['key']['id']} --tenant {caller['tenant']} {scopes}"
            failed.message += f" An operator can give it: {update}"
        if code == "tenant_not_found" and access.is_key:
            failed.message += f" {access.secret_from} is a key of the tenant '{self.caller()['tenant']}'."
        return failed

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


def decoded(server: str, response: httpx.Response, plane: str = "admin plane") -> Any:
    """The JSON of an answer. Raises CommandFailed."""
    try:
        return response.json()
    except ValueError as error:
        raise CommandFailed(
            f"{server} answered {response.status_code} with something that is not JSON; is it Loraplex's {plane}?"
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
            " Give the data port with --url."
            if key_option == "--api-key"
            else " Give the admin port with --admin-url; the data port has a tenant's own routes alone."
        )
    return CommandFailed(message, details=_report_lines(body.get("report")), body=body)


def _report_lines(report: Any) -> tuple[str, ...]:
    """The findings of an admission report, a line each."""
    return tuple(
        f"{name}: {line[:300]}" for name, text in report_fields(report).items() for line in text.splitlines()
    )
