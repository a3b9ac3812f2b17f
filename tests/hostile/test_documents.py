"""schemathesis over both OpenAPI documents, against both ports: what is documented is what is answered, whatever is
sent, and nothing that is sent is a failure of the server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import requests
import schemathesis
from schemathesis.checks import CHECKS, load_all_checks

from support.admin import ADMIN_TOKEN, SERVED_NAME
from support.whole_server import WholeServer, bearer, whole_server

CHECKED = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "missing_required_header",
    "unsupported_method",
)
SCOPES = ("inference", "adapters:read", "adapters:write", "usage:read")
THERE = {"name": "support", "version": "v1", "id": SERVED_NAME}
"""Path parameters that lead to something of the tenant that is there."""


@pytest.fixture
def own(tmp_path: Path) -> Iterator[WholeServer]:
    with whole_server(tmp_path, metrics_on_data_port=True) as running:
        yield running
        running.settle()


class Caller:
    """Calls operations of one port, with a key that may do everything there; statuses are counted."""

    def __init__(self, server: WholeServer, port: str) -> None:
        self.server, self.port = server, port
        self.url = server.data_url if port == "data" else server.admin_url
        self.statuses: Counter[int] = Counter()
        self.tenant = ""
        self._num_tenants = 0
        self.session = requests.Session()
        load_all_checks()
        self.checks = CHECKS.get_by_names(list(CHECKED))
        document = server.http.get(f"{self.url}/openapi.json").json()
        self.operations = [
            found.ok() for found in schemathesis.openapi.from_dict(document).get_all_operations()
        ]

    def make_what_is_there(self) -> None:
        """Some operations delete it."""
        services = self.server.plane.services
        if not any(info.id == self.tenant for info in services.tenants.list().items):
            self._num_tenants += 1  # an id is never given twice
            self.tenant = f"caller-{self._num_tenants}"
            self.server.plane.make_tenant(self.tenant)
        if not services.catalog.list_adapters(self.tenant).items:
            self.server.plane.make_adapter("support", self.tenant)
        secret = self.server.plane.make_key(self.tenant, *SCOPES)
        self.headers = bearer(ADMIN_TOKEN if self.port == "admin" else secret)

    def run(
        self, operation: Any, mode: Any, path: dict[str, str] | None, max_examples: int, seed: int
    ) -> None:
        cases = operation.as_strategy(generation_mode=mode, path_parameters=path)

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=max_examples,
            deadline=None,
            database=None,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(case=cases)
        def check(case: Any) -> None:
            answer = case.call(base_url=self.url, session=self.session, headers=self.headers, timeout=20)
            self.statuses[answer.status_code] += 1
            case.validate_response(answer, checks=self.checks)

        check()


def call_everything(server: WholeServer, port: str, *, max_examples: int, seed: int) -> Counter[int]:
    caller = Caller(server, port)
    modes = schemathesis.GenerationMode
    for operation in caller.operations:
        names = [parameter.name for parameter in operation.path_parameters]
        for mode, is_there in ((modes.POSITIVE, True), (modes.NEGATIVE, True), (modes.POSITIVE, False)):
            if not is_there and not names:
                continue
            if mode is modes.NEGATIVE and not (operation.body or operation.query):
                continue
            caller.make_what_is_there()
            there = THERE | {"tenant": caller.tenant}
            path = {name: there[name] for name in names if name in there} if is_there else None
            caller.run(operation, mode, path, max_examples, seed)
    return caller.statuses


@pytest.mark.parametrize("port", ["data", "admin"])
def test_both_ports_answer_as_documented(own: WholeServer, port: str) -> None:
    statuses = call_everything(own, port, max_examples=4, seed=1)
    assert statuses[200] > 20
    assert statuses[400] > 10


@pytest.mark.soak
@pytest.mark.parametrize("port", ["data", "admin"])
def test_both_ports_answer_as_documented_long(own: WholeServer, port: str) -> None:
    statuses = call_everything(own, port, max_examples=150, seed=2)
    print(f"\nschemathesis, {port} port: {sum(statuses.values())} requests, {dict(sorted(statuses.items()))}")
