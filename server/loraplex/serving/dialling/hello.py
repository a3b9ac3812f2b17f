"""The handshake of an engine that dials in: messages, and the checks of both sides as pure functions.

    server → engine   Challenge   a nonce, and the name of a probe in the artifact store
    engine → server   Hello       what the engine is, a MAC of the probe's content, a nonce of its own, and a MAC
    server → engine   Welcome     a MAC over the engine's nonce; or Refused, with one line

All MACs are HMAC-SHA256 under the shared token, of different labels, so that none can be sent back as another. A Hello
covers the server's nonce, so that a recorded one is worth nothing. Neither the token nor anything from the store ever
travels: a strange server learns nothing from an engine. Without TLS what follows the handshake is neither
encrypted nor authenticated: that is the network's part then.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, TypeVar

import msgspec

from loraplex.engine.ipc import framing
from loraplex.engine.ipc import protocol as wire

PROTOCOL = 1
"""Version of the handshake. The messages behind it have `messages_digest`."""
HANDSHAKE_S = 10.0
"""Longest time from a connection to its Welcome."""
MAX_FRAME_BYTES = 64 * 1024
"""Largest frame before the Welcome."""
MAX_REASON = 500
NONCE_BYTES = 32
_HELLO = b"loraplex engine 1\0"
_PROBE = b"loraplex probe 1\0"
_WELCOME = b"loraplex server 1\0"
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
MAX_NAME = 64
"""Longest name of a replica."""

Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Mac = Annotated[bytes, msgspec.Meta(max_length=hashlib.sha256().digest_size)]
Text = Annotated[str, msgspec.Meta(max_length=256)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME, pattern=NAME)]
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class HandshakeRefused(Exception):
    """One side does not take the other; the message says why in one line."""


class Challenge(msgspec.Struct, frozen=True, tag=True):
    protocol: int
    messages: Text
    nonce: Nonce
    probe: Digest
    """The name of the probe, for `read_probe`."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """`pid` is the engine process, `num_restarts` the number of those before it. `max_model_len` is in tokens,
    `max_adapter_rank` the largest rank that it loads. `probe` is a MAC of the content of the challenge's probe, empty
    where the engine cannot read it."""

    protocol: int
    messages: Text
    replica: Name
    node: Text
    pid: int
    num_restarts: int
    base_fingerprint: Text
    numerics: Text
    max_model_len: int
    max_adapter_rank: int
    probe: Mac
    nonce: Nonce
    mac: Mac = b""


class Welcome(msgspec.Struct, frozen=True, tag=True):
    mac: Mac


class Refused(msgspec.Struct, frozen=True, tag=True):
    reason: str


class Draining(msgspec.Struct, frozen=True, tag=True):
    """Engine to server, at any time after the Welcome: give it nothing new. The server closes the connection when the
    last answer has ended."""


class _Versions(msgspec.Struct, tag="Hello"):
    """The fields of every Hello, whatever its protocol."""

    protocol: int
    messages: Text = ""


MessageT = TypeVar("MessageT", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Expected:
    """Requirements of a server for its engines. `probe` is the content of its probe; `max_model_len` and
    `max_adapter_rank` are what each of them has to take at least. A length of 0 is any."""

    token: bytes
    base_fingerprint: str
    probe: bytes
    max_model_len: int = 0
    max_adapter_rank: int = 1


@dataclass(frozen=True, slots=True)
class Identity:
    """Facts that an engine says of itself; fields as in `Hello`."""

    replica: str
    node: str
    pid: int
    num_restarts: int
    base_fingerprint: str
    numerics: str
    max_model_len: int
    max_adapter_rank: int


@cache
def messages_digest() -> str:
    """A digest of the shapes of all commands and events: two processes that differ here do not understand each
    other."""
    schema = _without_prose(msgspec.json.schema(wire.Command | wire.Event | Draining))
    return hashlib.sha256(msgspec.json.encode(schema, order="sorted")).hexdigest()[:16]


def _without_prose(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _without_prose(value) for key, value in node.items() if key != "description"}
    return [_without_prose(value) for value in node] if isinstance(node, list) else node


def new_challenge(probe_digest: str) -> Challenge:
    return Challenge(PROTOCOL, messages_digest(), secrets.token_bytes(NONCE_BYTES), probe_digest)


def make_hello(challenge: Challenge, token: bytes, identity: Identity, probe: bytes) -> Hello:
    """The engine's answer. `probe` is what it read under the challenge's name, empty where it cannot. Raises
    HandshakeRefused for a server of another protocol."""
    _check_versions(challenge.protocol, challenge.messages, "the server")
    hello = Hello(
        PROTOCOL,
        messages_digest(),
        identity.replica,
        identity.node,
        identity.pid,
        identity.num_restarts,
        identity.base_fingerprint,
        identity.numerics,
        identity.max_model_len,
        identity.max_adapter_rank,
        _mac(token, _PROBE, challenge.nonce, probe) if probe else b"",
        secrets.token_bytes(NONCE_BYTES),
    )
    return msgspec.structs.replace(hello, mac=_hello_mac(token, challenge.nonce, hello))


def check_hello(payload: bytes, challenge: Challenge, expected: Expected) -> Hello:
    """The Hello of an engine that may join. Raises HandshakeRefused. A peer without the token is
    told nothing of this server but its protocol."""
    versions = _decode(payload, _Versions, "Hello")
    _check_versions(versions.protocol, versions.messages, "the engine")
    hello = _decode(payload, Hello, "Hello")
    if not hmac.compare_digest(hello.mac, _hello_mac(expected.token, challenge.nonce, hello)):
        raise HandshakeRefused(
            "the engine has another token than the server; give it a copy of the server's --engine-token-file"
        )
    if hello.base_fingerprint != expected.base_fingerprint:
        raise HandshakeRefused(
            f"the engine serves another base model: its fingerprint is '{hello.base_fingerprint}', the server's "
            f"'{expected.base_fingerprint}'; start it with the server's --model"
        )
    if hello.max_model_len < expected.max_model_len:
        raise HandshakeRefused(
            f"the engine takes a context of {hello.max_model_len} tokens, the server's --max-model-len is "
            f"{expected.max_model_len}; give the engine the same"
        )
    if hello.max_adapter_rank < expected.max_adapter_rank:
        raise HandshakeRefused(
            f"the engine loads adapters up to rank {hello.max_adapter_rank}, the server takes them up to "
            f"{expected.max_adapter_rank}; give it the server's --max-adapter-rank"
        )
    if not hmac.compare_digest(hello.probe, _mac(expected.token, _PROBE, challenge.nonce, expected.probe)):
        raise HandshakeRefused(
            "the engine cannot read the server's artifact store; give it the server's --artifact-url (s3://… or a "
            "shared file:///DIR), or on the same machine its --data-dir"
        )
    return hello


def make_welcome(hello: Hello, token: bytes) -> Welcome:
    return Welcome(_mac(token, _WELCOME, hello.nonce, hello.mac))


def check_answer(payload: bytes, hello: Hello, token: bytes) -> None:
    """Return if the server's answer to `hello` is a Welcome, by a server that has the token. Raises
    HandshakeRefused."""
    try:
        answer = msgspec.msgpack.decode(payload, type=Welcome | Refused)
    except framing.UNDECODABLE as error:
        raise HandshakeRefused(f"the server broke the handshake: {one_line(str(error))}") from error
    if isinstance(answer, Refused):
        raise HandshakeRefused(f"the server refuses: {one_line(answer.reason)}")
    if not hmac.compare_digest(answer.mac, _mac(token, _WELCOME, hello.nonce, hello.mac)):
        raise HandshakeRefused("the server does not know the token: it is another server")


def decode_challenge(payload: bytes) -> Challenge:
    """Raises HandshakeRefused."""
    return _decode(payload, Challenge, "Challenge")


def one_line(text: str) -> str:
    """A text of the other side, fit for a log line."""
    return "".join(char if char.isprintable() else " " for char in text[:MAX_REASON])


def _check_versions(protocol: int, messages: str, other: str) -> None:
    if protocol != PROTOCOL:
        raise HandshakeRefused(
            f"{other} speaks protocol {protocol}, this side protocol {PROTOCOL}; run one version of loraplex on both"
        )
    if messages != messages_digest():
        raise HandshakeRefused(
            f"{other} has other messages ('{one_line(messages)}') than this side ('{messages_digest()}'); run one "
            "version of loraplex on both"
        )


def _decode(payload: bytes, message: type[MessageT], name: str) -> MessageT:
    try:
        return msgspec.msgpack.decode(payload, type=message)
    except framing.UNDECODABLE as error:
        raise HandshakeRefused(f"what came is no {name}: {one_line(str(error))}") from error


def _hello_mac(token: bytes, nonce: bytes, hello: Hello) -> bytes:
    return _mac(token, _HELLO, nonce, msgspec.msgpack.encode(msgspec.structs.replace(hello, mac=b"")))


def _mac(token: bytes, label: bytes, *parts: bytes) -> bytes:
    """The parts but the last have a fixed length."""
    return hmac.new(token, label + b"".join(parts), hashlib.sha256).digest()
