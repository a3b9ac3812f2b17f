"""Secrets: the admin token and the pepper as files only their owner can read; keys' secrets and their hashes."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from loraplex.control.errors import SecretUnusable

KEY_PREFIX = "lpx"
PEPPER_BYTES = 32
_ID_CHARS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789")


@dataclass(frozen=True, slots=True)
class KeySecret:
    """`lpx_<id>_<secret>`: 8 random bytes name the key, 32 prove it."""

    key_id: str
    text: str


def new_key_secret(key_id: str | None = None) -> KeySecret:
    chosen = key_id or secrets.token_hex(8)
    return KeySecret(chosen, f"{KEY_PREFIX}_{chosen}_{secrets.token_urlsafe(32)}")


def key_id_of(text: str) -> str | None:
    """The id that a secret claims to belong to; None if it has not the form of one of our keys."""
    parts = text.split("_", 2)
    if len(parts) != 3 or parts[0] != KEY_PREFIX or not 1 <= len(parts[1]) <= 32 or not parts[2]:
        return None
    return parts[1] if _ID_CHARS.issuperset(parts[1]) else None


def hash_secret(pepper: bytes, text: str) -> str:
    """HMAC-SHA256 in hex. A slow hash buys nothing against 256 random bits."""
    return hmac.new(pepper, text.encode(), hashlib.sha256).hexdigest()


def same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())


def load_or_create(path: Path, make: str) -> tuple[str, bool]:
    """The text of a secret file, and whether it was made now from `make`. Mode 0600, and on the disk before it is
    used; of two processes that make it at once, one wins and both get its text. Raises SecretUnusable, OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    if not path.exists():
        with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as handle:
            handle.write(make + "\n")
            handle.flush()
            os.fsync(handle.fileno())
        try:
            os.link(scratch, path)
            _flush(path.parent)
            return make, True
        except FileExistsError:
            pass
        finally:
            scratch.unlink()
    text = path.read_text().strip()
    if not text:
        # An empty secret would be known to all.
        raise SecretUnusable(
            f"{path} is empty. Restore it from a backup, or delete it: then a new one is made, and what was made with "
            "the old one is void."
        )
    return text, False


def _flush(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def new_admin_token() -> str:
    return f"lpx-admin-{secrets.token_urlsafe(32)}"


def load_pepper(data_dir: Path, given: str = "") -> bytes:
    """The pepper of this installation's keys: `given` in hex, or from its file, made at the first start. Without it no
    key works any more. Raises SecretUnusable, OSError."""
    if given:
        return bytes.fromhex(given)
    path = data_dir / "key-pepper"
    text, _ = load_or_create(path, secrets.token_hex(PEPPER_BYTES))
    try:
        pepper = bytes.fromhex(text)
    except ValueError:
        pepper = b""
    if len(pepper) != PEPPER_BYTES:
        raise SecretUnusable(
            f"{path} is damaged: it holds no {2 * PEPPER_BYTES} hex digits. Restore it from a backup; a new one would "
            "make every API key useless."
        )
    return pepper
