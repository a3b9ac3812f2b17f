"""TLS of the port that engines dial: the server shows a certificate, the engine checks it. That the engine may join is
the token's affair."""

from __future__ import annotations

import ssl
from collections.abc import Callable

from loraplex.app.settings import Settings, SettingsInvalid


def port_tls(settings: Settings) -> ssl.SSLContext | None:
    """The server's end of TLS, of `--engine-tls-cert` and `--engine-tls-key`; None where neither is given. Raises
    SettingsInvalid."""
    cert, key = settings.engine_tls_cert, settings.engine_tls_key
    if not cert and not key:
        return None
    if not cert or not key:
        missing, given = ("cert", "key") if key else ("key", "cert")
        raise SettingsInvalid(f"--engine-tls-{given} needs --engine-tls-{missing} beside it.")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    _read(lambda: context.load_cert_chain(cert, key), f"--engine-tls-cert {cert} with --engine-tls-key {key}")
    return context


def engine_tls(settings: Settings) -> ssl.SSLContext | None:
    """The engine's end of TLS, which trusts `--engine-tls-ca` alone and checks the name that is dialled; None where it
    is not given. Raises SettingsInvalid."""
    ca = settings.engine_tls_ca
    if not ca:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    _read(lambda: context.load_verify_locations(ca), f"--engine-tls-ca {ca}")
    return context


def _read(load: Callable[[], None], files: str) -> None:
    try:
        load()
    except OSError as error:  # ssl.SSLError is one
        reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
        raise SettingsInvalid(f"{files} cannot be used: {reason}; PEM files are expected.") from error
