"""Which server a command talks to, and with which secret: an operator's admin token, or a tenant's own key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from loraplex.app.commands.shared.errors import CommandFailed
from loraplex.control.tenancy.secrets import key_id_of


@dataclass(frozen=True, slots=True)
class Access:
    """`secret_from` names the option, variable or file that the secret comes from, `url_option` the option for the
    address. `also`: the place of a key that is there too and is not used."""

    url: str
    secret: str
    url_option: str
    secret_from: str
    also: str = ""

    @property
    def is_key(self) -> bool:
        """Whether the secret is a tenant's key: given as one, or as an admin token and of a key's form."""
        return self.url_option == "--url" or self.key_id is not None

    @property
    def key_id(self) -> str | None:
        return key_id_of(self.secret)


@dataclass(frozen=True, slots=True)
class Given:
    """The options of a command, or their variables. `is_option` says whether the command line names one itself. `url`
    and `api_key` are None of a command that takes no tenant's key."""

    admin_url: str
    admin_token: str | None
    data_dir: Path | None
    is_option: Callable[[str], bool]
    url: str | None = None
    api_key: str | None = None

    def place(self, name: str) -> str:
        return "--" + name.replace("_", "-") if self.is_option(name) else f"LORAPLEX_{name.upper()}"


def choose_access(given: Given) -> Access:
    """An option goes before every variable; among options, and among variables, an admin token goes before a
    data directory, and both before a key. Raises CommandFailed where there is no secret, and where the command line
    gives both a token and a key."""
    if given.is_option("api_key") and (given.is_option("admin_token") or given.is_option("data_dir")):
        other = "--admin-token" if given.is_option("admin_token") else "--data-dir"
        raise CommandFailed(f"--api-key and {other} are two callers: give one of them.")
    if given.api_key and given.url is not None and (given.is_option("api_key") or not _has_admin(given)):
        return Access(given.url, given.api_key, "--url", given.place("api_key"))
    also = given.place("api_key") if given.api_key else ""
    prefers_directory = given.is_option("data_dir") and not given.is_option("admin_token")
    if given.admin_token and not prefers_directory:
        place = given.place("admin_token")
        return Access(given.admin_url, given.admin_token, "--admin-url", place, also)
    if given.data_dir is not None:
        token = _read_token(given.data_dir)
        return Access(given.admin_url, token, "--admin-url", str(given.data_dir / "admin-token"), also)
    operators = "set LORAPLEX_ADMIN_TOKEN, or give the server's --data-dir"
    strange = _misspelt_variables()
    if given.url is None:
        raise CommandFailed(f"no admin token: {operators}.{strange}")
    raise CommandFailed(
        "no key and no admin token: a tenant sets LORAPLEX_API_KEY to its key and LORAPLEX_URL to the data port; an "
        f"operator can {operators}.{strange}"
    )


def _misspelt_variables() -> str:
    """A sentence about variables that nothing reads; empty where there are none."""
    # It takes time to import, which no command pays that has its secret.
    from loraplex.app.settings import unknown_variables

    strange = unknown_variables()
    return f" {strange}" if strange else ""


def _has_admin(given: Given) -> bool:
    return bool(given.admin_token) or given.data_dir is not None


def _read_token(data_dir: Path) -> str:
    path = data_dir / "admin-token"
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise CommandFailed(f"the admin token cannot be read from {path}: {reason}.") from error
    if not token:
        raise CommandFailed(f"{path} is empty; set LORAPLEX_ADMIN_TOKEN.")
    return token
