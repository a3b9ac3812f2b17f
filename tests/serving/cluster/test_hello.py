"""The handshake of an engine that dials in, as pure functions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.serving.dialling.hello import (
    Challenge,
    Expected,
    HandshakeRefused,
    Hello,
    Identity,
    Refused,
    check_answer,
    check_hello,
    decode_challenge,
    make_hello,
    make_welcome,
    new_challenge,
)

TOKEN = b"the token of this server"
EXPECTED = Expected(TOKEN, "fingerprint-a", b"content of the probe", 4096, 64)
IDENTITY = Identity("one", "node-1", 42, 0, "fingerprint-a", "numerics", 4096, 64)
CHALLENGE = new_challenge("a" * 64)


def hello(
    challenge: Challenge = CHALLENGE, token: bytes = TOKEN, probe: bytes = EXPECTED.probe, **identity: Any
) -> Hello:
    said = {field: getattr(IDENTITY, field) for field in IDENTITY.__dataclass_fields__} | identity
    return make_hello(challenge, token, Identity(**said), probe)


def refusal(payload: bytes, challenge: Challenge = CHALLENGE) -> str:
    with pytest.raises(HandshakeRefused) as caught:
        check_hello(payload, challenge, EXPECTED)
    reason = str(caught.value)
    assert "\n" not in reason
    assert TOKEN.decode() not in reason
    return reason


def encoded(message: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(message)


def test_both_sides_know_each_other_by_the_token() -> None:
    mine = hello()
    assert check_hello(encoded(mine), CHALLENGE, EXPECTED) == mine
    check_answer(encoded(make_welcome(mine, TOKEN)), mine, TOKEN)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: hello(token=b"another"), "has another token than the server"),
        (lambda: hello(new_challenge("a" * 64)), "has another token than the server"),
        (lambda: hello(base_fingerprint="fingerprint-b"), "'fingerprint-b', the server's 'fingerprint-a'"),
        (lambda: hello(probe=b""), "cannot read the server's artifact store"),
        (lambda: hello(probe=b"of another store"), "cannot read the server's artifact store"),
        (lambda: hello(max_model_len=4095), "a context of 4095 tokens, the server's --max-model-len is 4096"),
        (lambda: hello(max_adapter_rank=16), "up to rank 16, the server takes them up to 64"),
        (lambda: msgspec.structs.replace(hello(), pid=43), "has another token"),
        (lambda: msgspec.structs.replace(hello(), mac=b""), "has another token"),
        (lambda: msgspec.structs.replace(hello(), protocol=2), "speaks protocol 2, this side protocol 1"),
        (lambda: msgspec.structs.replace(hello(), messages="older"), "has other messages ('older')"),
        (lambda: hello(replica="../etc"), "no Hello"),
        (lambda: hello(replica="n" * 65), "no Hello"),
        (lambda: Refused("x"), "no Hello"),
    ],
)
def test_a_hello_is_refused_in_one_line(make: Callable[[], msgspec.Struct], reason: str) -> None:
    assert reason in refusal(encoded(make()))


def test_an_engine_that_takes_more_is_let_in() -> None:
    mine = hello(max_model_len=8192, max_adapter_rank=512)
    assert check_hello(encoded(mine), CHALLENGE, EXPECTED) == mine


def test_an_older_protocol_is_named_whatever_else_it_says() -> None:
    assert "speaks protocol 0" in refusal(msgspec.msgpack.encode({"type": "Hello", "protocol": 0, "who": 1}))


def test_a_peer_without_the_token_is_not_told_of_the_base_or_the_store() -> None:
    reason = refusal(encoded(hello(token=b"another", base_fingerprint="b", probe=b"")))
    assert "fingerprint" not in reason
    assert "store" not in reason


def test_nothing_of_the_store_is_sent_to_a_server_that_nobody_knows() -> None:
    assert EXPECTED.probe not in encoded(hello())


def test_no_content_is_never_the_content_of_a_probe() -> None:
    with pytest.raises(HandshakeRefused, match="cannot read"):
        check_hello(encoded(hello(probe=b"")), CHALLENGE, Expected(TOKEN, "fingerprint-a", b""))


def test_a_server_without_the_token_is_known() -> None:
    mine = hello()
    with pytest.raises(HandshakeRefused, match="does not know the token"):
        check_answer(encoded(make_welcome(mine, b"another")), mine, TOKEN)
    with pytest.raises(HandshakeRefused, match="does not know the token"):
        check_answer(encoded(make_welcome(hello(), TOKEN)), mine, TOKEN)


def test_a_server_cannot_send_back_the_mac_of_the_engine() -> None:
    mine = hello()
    with pytest.raises(HandshakeRefused, match="does not know the token"):
        check_answer(msgspec.msgpack.encode({"type": "Welcome", "mac": mine.mac}), mine, TOKEN)


def test_the_reason_of_a_server_is_one_line_of_bounded_length() -> None:
    with pytest.raises(HandshakeRefused) as caught:
        check_answer(encoded(Refused("a\nb\x1b[31m" + "c" * 10_000)), hello(), TOKEN)
    assert str(caught.value).startswith("the server refuses: a b [31mccc")
    assert len(str(caught.value)) < 600


def test_a_server_of_another_protocol_is_named() -> None:
    with pytest.raises(HandshakeRefused, match="the server speaks protocol 7"):
        hello(msgspec.structs.replace(CHALLENGE, protocol=7))


def test_the_name_of_a_probe_is_no_path() -> None:
    with pytest.raises(HandshakeRefused, match="no Challenge"):
        decode_challenge(encoded(msgspec.structs.replace(CHALLENGE, probe="../../etc/passwd")))


@given(st.binary(max_size=400))
def test_any_bytes_are_refused(payload: bytes) -> None:
    refusal(payload)
    for check in (decode_challenge, lambda given: check_answer(given, hello(), TOKEN)):
        with pytest.raises(HandshakeRefused):
            check(payload)


@given(st.data())
def test_a_hello_with_any_byte_changed_is_refused_or_says_the_same(data: st.DataObject) -> None:
    mine = hello()
    payload = bytearray(encoded(mine))
    at = data.draw(st.integers(0, len(payload) - 1))
    payload[at] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(HandshakeRefused):
        assert check_hello(bytes(payload), CHALLENGE, EXPECTED) == mine


@given(
    st.dictionaries(
        st.sampled_from([*Hello.__struct_fields__, "type", "other"]),
        st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.just("Hello"),
    )
)
def test_any_fields_are_refused(fields: dict[str, Any]) -> None:
    try:
        payload = msgspec.msgpack.encode(fields)
    except OverflowError:
        return
    refusal(payload)
