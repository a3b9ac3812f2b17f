"""Requests that nobody would send, over every route of both ports, from their OpenAPI documents and a seed."""

from __future__ import annotations

import json
import random
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

import httpx

from support.fuzz.fuzzing import mutate

SCALARS: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    16,
    2**31,
    2**53,
    -(2**63),
    2**64,
    0.5,
    1e308,
    -0.0,
    "",
    "x",
    "auto",
    "none",
    "acme",
    "support",
    "v1",
    "a" * 300,
    "\0",
    "\n\x1b[31m",
    "\u202e𝄞é",
    "<|im_end|>",
    "2030-01-01T00:00:00Z",
    "inference",
)
NAMES = (
    "acme",
    "support",
    "v1",
    "nobody",
    "..",
    "%",
    "a" * 300,
    "A B",
    "é",
    "a\n",
    "@v1",
    "x:y",
    "0",
    "-",
    "sha256:0",
)
RAW = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer KEY\r\nContent-Length: 29\r\n\r\n"
    b'{"model":"tiny","prompt":"x"}',
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer KEY\r\nConnection: keep-alive\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
)


@dataclass
class ApiFuzzer:
    """One client. `keys` are secrets of every kind; `bodies` valid ones by path. `statuses` counts what came."""

    urls: Mapping[str, str]
    documents: Mapping[str, Mapping[str, Any]]
    keys: Sequence[str]
    bodies: Mapping[str, Any]
    seed: str
    statuses: Counter[int] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)
        self._http = httpx.Client(timeout=60)
        self._routes = [
            (port, method.upper(), path)
            for port, document in self.documents.items()
            for path, methods in document["paths"].items()
            for method in methods
        ]
        self._corpus = [json.dumps(body).encode() for body in self.bodies.values()]

    def close(self) -> None:
        self._http.close()

    def one(self, number: int) -> None:
        """The next request; every route comes in turn."""
        if self._chance.random() < 0.1:
            self._raw()
            return
        port, method, path = self._routes[number % len(self._routes)]
        chance = self._chance
        if method == "DELETE" and path == "/admin/v1/tenants/{tenant}":
            path = "/admin/v1/tenants/nobody"  # without a tenant, and its keys, all that follows were a 401
        for part in path.split("/"):
            if part.startswith("{"):
                name = chance.choice(NAMES[:3]) if chance.random() < 0.5 else chance.choice(NAMES)
                path = path.replace(part, quote(name, safe=""), 1)
        if chance.random() < 0.2:
            query = "&".join(
                f"{chance.choice(('limit', 'cursor', 'x'))}={chance.choice(NAMES)}" for _ in range(3)
            )
            path += "?" + quote(query, safe="&=%")
        headers = {"authorization": f"Bearer {chance.choice(self.keys)}"}
        if chance.random() < 0.2:
            extra = chance.choice(
                ("x-request-id", "expect", "content-encoding", "accept", "x", "upgrade", "range")
            )
            headers[extra] = chance.choice(("gzip", "100-continue", "h2c", "x" * 2000, "{}", "0-"))
        content = self._body(path, headers) if method in ("POST", "PUT", "PATCH") else None
        try:
            answer = self._http.request(method, self.urls[port] + path, headers=headers, content=content)
        except httpx.HTTPError as error:
            self.failures.append(f"{method} {path} {headers}: {error!r}")
            return
        self._check(f"{method} {path}", answer)

    def _check(self, asked: str, answer: httpx.Response) -> None:
        self.statuses[answer.status_code] += 1
        wrong = answer.status_code >= 500 and answer.status_code != 503
        if not wrong and answer.status_code >= 400 and answer.request.method != "HEAD":
            kind = answer.headers.get("content-type", "")
            wrong = kind not in ("application/json", "application/problem+json") and answer.status_code != 431
        if wrong or (answer.status_code != 431 and "x-request-id" not in answer.headers):
            self.failures.append(f"{asked}: {answer.status_code} {answer.text[:300]}")

    def _body(self, path: str, headers: dict[str, str]) -> bytes:
        chance = self._chance
        if "/versions" in path and chance.random() < 0.8:
            headers["content-type"] = "multipart/form-data; boundary=b"
            parts = b"".join(
                b'--b\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
                % (name, chance.randbytes(50))
                for name in (b"adapter_config.json", b"adapter_model.safetensors")
            )
            return mutate(parts + b"--b--\r\n", self._corpus, chance, 100_000)
        headers["content-type"] = "application/json"
        body = self.bodies.get(path.partition("?")[0], {})
        if chance.random() < 0.4:
            return mutate(json.dumps(body).encode(), self._corpus, chance, 100_000)
        changed = dict(body)
        for _ in range(chance.randrange(4)):
            known = [*body, "n", "stop", "logit_bias", "limits", "scopes", "models", "targets", "stream", "x"]
            changed[chance.choice(known)] = self._value(0)
        return json.dumps(changed).encode("utf-8", "surrogatepass")

    def _value(self, depth: int) -> Any:
        chance = self._chance
        kind = chance.randrange(4) if depth < 4 else 0
        if kind == 1:
            return [self._value(depth + 1) for _ in range(chance.randrange(5))]
        if kind == 2:
            return {str(chance.choice(SCALARS)): self._value(depth + 1) for _ in range(chance.randrange(5))}
        return chance.choice(SCALARS)

    def _raw(self) -> None:
        chance = self._chance
        request = chance.choice(RAW).replace(b"KEY", chance.choice(self.keys).encode())
        target = urlsplit(self.urls[chance.choice(list(self.urls))])
        with socket.create_connection((target.hostname, target.port), timeout=60) as sock:
            try:
                sock.sendall(mutate(request, RAW, chance, 100_000))
                sock.shutdown(socket.SHUT_WR)
                answer = sock.recv(1 << 16)
            except (ConnectionError, TimeoutError):
                answer = b""
        if answer.startswith(b"HTTP/1.1 "):
            status = int(answer[9:12])
            self.statuses[status] += 1
            if status >= 500 and status != 503:
                self.failures.append(f"{request!r}: {answer[:300]!r}")


def both_documents(urls: Mapping[str, str]) -> dict[str, Any]:
    return {port: httpx.get(f"{url}/openapi.json", timeout=60).json() for port, url in urls.items()}


def valid_bodies(model: str) -> dict[str, Any]:
    """By path: what each route takes."""
    tenant = "/admin/v1/tenants/acme"
    return {
        "/v1/completions": {"model": model, "prompt": "The sea", "max_tokens": 2, "temperature": 0},
        "/v1/embeddings": {"model": model, "input": ["The sea", "A ship"], "encoding_format": "base64"},
        "/classify": {"model": model, "input": ["The sea", "A ship"]},
        "/score": {"model": model, "text_1": "The sea", "text_2": ["A ship", "A hat"]},
        "/v1/rerank": {
            "model": model,
            "query": "The sea",
            "documents": ["A ship", {"text": "A hat"}],
            "top_n": 1,
        },
        "/v1/responses": {"model": model, "input": "The sea", "max_output_tokens": 2},
        "/v1/responses/compact": {"model": model, "input": "The sea"},
        "/v1/messages": {"model": model, "max_tokens": 2, "messages": [{"role": "user", "content": "x"}]},
        "/v1/messages/count_tokens": {"model": model, "messages": [{"role": "user", "content": "x"}]},
        "/v1/chat/completions": {
            "model": model,
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 2,
            "stop": ["x"],
        },
        "/admin/v1/tenants": {"id": "acme", "weight": 2.0, "limits": {"max_concurrency": 50}},
        tenant: {"display_name": "Acme", "limits": {"max_concurrency": None}},
        f"{tenant}/keys": {"name": "k", "scopes": ["inference"]},
        f"{tenant}/keys/0/rotate": {"grace_seconds": 1},
        f"{tenant}/adapters/support/release": {
            "targets": [{"version": "v1", "weight": 1}],
            "sticky": "none",
            "guard": {"metrics": [{"name": "ttft", "margin": 0.1}]},
            "schedule": [{"weight": 1, "for_seconds": 600}],
            "shadow": {"version": "v1", "sample": 0.5, "keep_texts": False},
        },
        f"{tenant}/adapters/support/release/promote": {"version": "v1"},
        f"{tenant}/adapters/support/release/rollback": {"to": 1},
    }
