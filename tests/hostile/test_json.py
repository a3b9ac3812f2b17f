"""Bodies that are hard to read, on every route of both ports that takes JSON: a 400 in its plane's shape, at once."""

from __future__ import annotations

import time
from typing import Any

import pytest

from support.http.admin_plane import ADMIN_TOKEN
from support.http.whole_server import WholeServer, bearer

DEEP = 100_000
FIELD = {
    "/v1/chat/completions": b'"model":"tiny","messages":',
    "/v1/completions": b'"model":"tiny","prompt":',
    "/v1/responses": b'"model":"tiny","input":',
    "/v1/responses/compact": b'"model":"tiny","input":',
    "/v1/messages": b'"model":"tiny","max_tokens":2,"messages":',
    "/v1/messages/count_tokens": b'"model":"tiny","messages":',
    "/v1/embeddings": b'"model":"tiny","input":',
    "/admin/v1/tenants": b'"id":',
    "/admin/v1/tenants/acme/keys": b'"name":',
}
VALUES: dict[str, bytes] = {
    "arrays in arrays": b"[" * DEEP + b"]" * DEEP,
    "arrays in arrays, unclosed": b"[" * DEEP,
    "objects in objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "a wide object": b"{" + b",".join(b'"k%d":0' % n for n in range(20_000)) + b"}",
    "a wide array": b"[" + b"0," * 100_000 + b"0]",
    "a long number": b"9" * 200_000,
    "a long fraction": b"0." + b"9" * 200_000,
    "an exponent": b"1e999999",
    "an exponent in a list": b"[1e999999,-1e999999]",
    "a negative exponent": b"1e-999999999999999999999",
    "a big integer": b"[" + b"1" + b"0" * 400 + b"]",
    "NaN": b"NaN",
    "Infinity": b"-Infinity",
    "a lone surrogate": b'"\\ud800"',
    "a lone surrogate in a list": b'["\\udfff"]',
    "surrogates the wrong way round": b'"\\udc00\\ud800"',
    "a raw surrogate": b'"\xed\xa0\x80"',
    "bytes that are no UTF-8": b'"\xff\xfe"',
    "an overlong NUL": b'"\xc0\x80"',
    "a raw NUL": b'"\0"',
    "a raw line feed": b'"\n"',
    "a key of surrogates": b'{"\\ud800":1}',
    "an unclosed string": b'"',
    "an unknown escape": b'"\\x41"',
    "a half escape": b'"\\u00"',
    "a comment": b"/* x */ 1",
    "a trailing comma": b"[1,]",
    "a leading zero": b"01",
    "a plus": b"+1",
    "hexadecimal": b"0x10",
    "nothing": b"",
}


def whole_bodies(field: bytes) -> dict[str, bytes]:
    valid = b"{" + field + b'"x"}'
    return {
        "a BOM": b"\xef\xbb\xbf" + valid,
        "UTF-16": valid.decode().encode("utf-16"),
        "UTF-32": valid.decode().encode("utf-32-le"),
        "a NUL behind": valid + b"\0",
        "two documents": valid + valid,
        "text behind": valid + b" x",
        "only spaces": b" " * 100_000,
        "many tabs": b"\t" * 100_000 + b"x",
        "an array": b"[" + valid + b"]",
        "null": b"null",
        "a string": b'"' + b"a" * 100_000 + b'"',
    }


@pytest.mark.parametrize("path", list(FIELD))
def test_bodies_that_are_hard_to_read(server: WholeServer, path: str) -> None:
    field = FIELD[path]
    admin = path.startswith("/admin")
    url = (server.admin_url if admin else server.data_url) + path
    key = ADMIN_TOKEN if admin else server.plane.make_key("acme", "inference")
    headers = {**bearer(key), "content-type": "application/json"}
    bodies = {name: b"{" + field + value + b"}" for name, value in VALUES.items()} | whole_bodies(field)
    for name, body in bodies.items():
        answer = server.http.post(url, content=body, headers=headers)
        if admin and len(body) > 256 << 10:
            assert answer.status_code == 413, name
        else:
            assert answer.status_code == 400, (name, answer.text[:300])
        check_shape(answer)
    # The same field in a valid body comes through.
    turns = b'[{"role":"user","content":"x"}]'
    good = {"/admin/v1/tenants": b'"json"'}
    good |= dict.fromkeys(("/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"), turns)
    answer = server.http.post(url, content=b"{" + field + good.get(path, b'"x"') + b"}", headers=headers)
    assert answer.status_code in (200, 201), answer.text
    if path == "/admin/v1/tenants":
        server.plane.services.tenants.delete("json")


def check_shape(answer: Any) -> None:
    assert len(answer.content) < 4096, "an answer does not repeat what was sent"
    told = answer.json()
    if "request_id" in told:
        assert set(told["error"]) == {"message", "type"}
    elif "error" in told:
        assert set(told["error"]) == {"message", "type", "param", "code"}
    else:
        assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["x-request-id"]


def test_keys_that_stand_twice(server: WholeServer) -> None:
    """The admin plane refuses them. On the data plane the last one counts, as for OpenAI's clients and servers."""
    twice = b'{"id": "first", "id": "second"}'
    answer = server.http.post(
        f"{server.admin_url}/admin/v1/tenants", content=twice, headers=bearer(ADMIN_TOKEN)
    )
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_json")
    body = b'{"model": "nothing", "prompt": "x", "model": "tiny"}'
    key = bearer(server.plane.make_key("acme", "inference"))
    answer = server.http.post(f"{server.data_url}/v1/completions", content=body, headers=key)
    assert (answer.status_code, answer.json()["model"]) == (200, "tiny")


def test_the_deepest_body_is_read_in_a_moment(server: WholeServer) -> None:
    key = bearer(server.plane.make_key("acme", "inference"))
    body = b"[" * (4 << 20)
    began = time.process_time()
    answer = server.http.post(f"{server.data_url}/v1/completions", content=body, headers=key)
    assert answer.status_code == 400
    assert time.process_time() - began < 5  # processor time, of the client too: quadratic would be hours
