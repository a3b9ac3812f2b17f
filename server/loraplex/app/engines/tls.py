"""TLS of the port that engines dial: the server shows a certificate, the engine checks it. That the engine may join is
the token's affair."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path

from loraplex.app.settings import Settings, SettingsInvalid

CA = "ca.crt"
"""The certificates that an engine trusts."""


def port_tls(settings: Settings) -> ssl.SSLContext | None:
    """The server's end of TLS, of the folder `--engine-tls`; None where it is not given. Raises SettingsInvalid."""
    if not settings.engine_tls:
        return None
    folder = Path(settings.engine_tls)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    _read(
        lambda: context.load_cert_chain(folder / "tls.crt", folder / "tls.key"),
        f"--engine-tls {folder}: tls.crt with tls.key",
    )
    return context


def engine_tls(settings: Settings) -> ssl.SSLContext | None:
    """The engine's end of TLS, which trusts ca.crt of the folder `--engine-tls` alone and checks the name that is
    dialled; None where it is not given. Raises SettingsInvalid."""
    if not settings.engine_tls:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    authority = Path(settings.engine_tls) / CA
    _read(lambda: context.load_verify_locations(authority), f"--engine-tls {settings.engine_tls}: {CA}")
    return context


def _read(load: Callable[[], None], files: str) -> None:
    try:
        load()
    except OSError as error:  # ssl.SSLError is one
        reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
        raise SettingsInvalid(f"{files} cannot be used: {reason}; PEM files are expected.") from error
