"""schemathesis over both OpenAPI documents, against both ports: what is documented is what is answered, whatever is
sent, what is valid by the document is accepted, and nothing that is sent is a failure of the server."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import requests
import schemathesis
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.core import NotSet
from schemathesis.core.parameters import ParameterLocation

from loraplex.api.anthropic import history as messages_history
from loraplex.api.openai import history
from loraplex.api.responses import history as responses_history
from loraplex.api.tinker.paths import new_session
from support.http.admin_plane import ADMIN_TOKEN, SERVED_NAME
from support.http.whole_server import WholeServer, bearer, whole_server
from support.placement.fake_cluster import fake_report

ACCEPTED, REFUSED = "positive_data_acceptance", "negative_data_rejection"
CHECKED = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    REFUSED,
    ACCEPTED,
    "missing_required_header",
    "unsupported_method",
)
TIMEOUT = "x-loraplex-timeout-ms"
MAX_LOAD = "x-loraplex-max-load-ms"
SCOPES = ("inference", "adapters:read", "adapters:write", "adapters:train", "usage:read")
REFUSED_ALL_THE_SAME = {
    # What is there now decides, or what time it is.
    (400, "invalid_cursor", "cursor"),  # only what the list gave is taken
    (400, "invalid_cursor", "after"),
    (412, "precondition_failed", "If-Match"),
    (429, "rate_limit_exceeded", None),
    (400, "invalid_value", "targets"),  # a version that is not ready; and one that is named twice
    (400, "invalid_value", "shadow.version"),  # one that is not ready, or has traffic
    (400, "invalid_value", "to"),  # no such revision
    (400, "invalid_value", "limits.token_budget"),  # a change of one of the two, by what the other is
    (400, "invalid_value", "limits.budget_period"),
    (400, "invalid_value", "limits.device_bytes_reserved"),  # at most what the device can keep, and the cap
    (400, "invalid_value", "expires_at"),  # in the past
    # What is in the files of an upload.
    (422, None, None),
    # The model decides: its length, its vocabulary, its tokenizer, its chat template.
    (400, "context_length_exceeded", None),
    (400, "invalid_value", "prompt"),
    (400, "invalid_value", "messages"),
    (400, "invalid_value", "logit_bias"),
    (400, "invalid_value", "stop_token_ids"),
    (400, "invalid_value", "logprob_token_ids"),
    (400, "invalid_value", "tokens"),
    (400, "unsupported_field", "tools"),  # it has no format for calls
    (400, "unsupported_field", "dimensions"),  # the numbers that it has
    (400, "unsupported_field", "model"),  # it has no head
    # No schema looks into a text, or compares two names.
    (400, "invalid_value", "messages[].tool_calls[].function.arguments"),
    (400, "invalid_value", "tools[].function.name"),
    (400, "invalid_value", "agreement"),  # JSON in a part of a form
    (400, "invalid_value", "tool_choice.function"),
    (400, "invalid_value", "tool_choice.allowed_tools.tools"),
    # No schema compares two numbers or two times.
    (400, "invalid_value", "schedule[].weight"),  # not above that of the step before
    (400, "unsupported_field", "best_of"),  # another than `n`
    (400, "invalid_value", "input"),  # the model's template
    (400, "unsupported_field", "reasoning_effort"),  # the chat template knows none
    (400, "unsupported_field", "chat_template_kwargs.enable_thinking"),
    (400, "unsupported_field", "reasoning.effort"),
    (400, "invalid_value", "input[].arguments"),  # no JSON object
    (400, "unsupported_field", "input[].encrypted_content"),  # not made here
    (400, None, "tool_choice"),  # what the choice names is among the tools
    (400, None, "tool_choice.name"),
    (400, None, "tool_choice.tools"),
    (400, "unsupported_field", "tools"),  # the model has no format for calls
    (400, "invalid_value", "start"),  # not before `end`
    (400, "invalid_value", "min_tokens"),  # more than the answer's length
    (400, "invalid_value", "max_tokens"),  # another than `max_completion_tokens`
    (400, "invalid_value", "logprobs"),  # times choices, prompts and tokens
    (400, "invalid_value", "top_logprobs"),
    # No schema counts the texts of two sides, which have several names.
    (400, "invalid_value", "text_1"),
    (400, "invalid_value", "text_2"),
    (400, "invalid_value", "documents"),
    (400, "invalid_value", "items"),
    (400, "invalid_value", "data_2"),
    # One of three names of a model, which no schema asks for that keeps each of them optional.
    (400, "invalid_value", "base_model"),
    (400, "invalid_value", "model_path"),
    (400, "invalid_value", "prompt_logprobs_last_n"),  # fewer than the prompt has
    (410, "future_gone", "request_id"),  # an id that was not given
}
"""Status, code and field (None: any) of refusals of what is valid by the document, which cannot say more."""

EXPLAINED_MESSAGES = (
    "maximum context length",
    "The last message is the assistant's",
    "was not made by this server",
    "'tool_choice' needs a tool",
    "'tools' has no tool",
    "beyond the model's",
    "'min_tokens' is larger",
    "chat template",
    "has no format for calls",
)
"""The same, of routes whose errors have neither a code nor a field."""

NEVER_ACCEPTED = {
    "POST /admin/v1/tenants/{tenant}/adapters/{name}/versions",
    "POST /admin/v1/tenants/{tenant}/adapters/{name}/release/rollback",
    "POST /admin/v1/tenants/{tenant}/adapters/{name}/release/pause",
    "POST /admin/v1/tenants/{tenant}/adapters/{name}/release/resume",
    *(f"POST {path}" for path in ("/classify", "/v1/classify", "/score", "/v1/score")),
    *(f"POST {path}" for path in ("/v1/rerank", "/rerank", "/v2/rerank")),
    "GET /v1/files/{id}",
    "GET /v1/files/{id}/content",
    "DELETE /v1/files/{id}",
    "POST /admin/v1/tenants/{tenant}/adapters/{name}/versions/{version}/agreement",
    "POST /api/v1/retrieve_future",
    "POST /v1/batches",
    "GET /v1/batches/{id}",
    "POST /v1/batches/{id}/cancel",
    "POST /admin/v1/batches/{batch}/cancel",
}
"""What needs an adapter's files, a history of releases, a release that runs, a file or a version with a head, which
nobody makes by chance."""


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
        self.accepted: Counter[str] = Counter()
        document = server.http.get(f"{self.url}/openapi.json").json()
        self.operations = [
            found.ok() for found in schemathesis.openapi.from_dict(document).get_all_operations()
        ]

    def make_what_is_there(self) -> None:
        """Some operations delete it. `there` are path parameters that lead to it."""
        services = self.server.plane.services
        if not any(info.id == self.tenant for info in services.tenants.list().items):
            self._num_tenants += 1  # an id is never given twice
            self.tenant = f"caller-{self._num_tenants}"
            self.server.plane.make_tenant(self.tenant)
        if not services.catalog.list_adapters(self.tenant).items:
            self.server.plane.make_adapter("support", self.tenant)
        (adapter, *_) = services.catalog.list_adapters(self.tenant).items
        info, _ = services.keys.create(self.tenant)
        # One of two that take requests may be drained.
        self.server.plane.engine.replicas = {name: fake_report(name) for name in ("replica-1", "replica-2")}
        self.there = {
            "replica": "replica-1",
            "batch": "batch_none",
            "tenant": self.tenant,
            "name": adapter.name,
            "version": f"v{adapter.latest}",
            "key": info.id,
            "id": SERVED_NAME,
            "sampler_id": new_session(SERVED_NAME),
            "session_id": "session-1",
        }
        secret = self.server.plane.make_key(self.tenant, *SCOPES)
        self.headers = bearer(ADMIN_TOKEN if self.port == "admin" else secret)

    def _not_for(self, case: Any, answer: Any) -> list[Any]:
        """No body, where none is needed, counts as a wrong one to schemathesis."""
        left_out = isinstance(case.body, NotSet) and not any(body.is_required for body in case.operation.body)
        modes = {
            part.mode
            for place, part in case.meta.components.items()
            if not (left_out and place is ParameterLocation.BODY)
        }
        if answer.status_code < 300 and is_mended(case.body):
            return CHECKS.get_by_names([REFUSED])
        if schemathesis.GenerationMode.NEGATIVE not in modes:
            return CHECKS.get_by_names([REFUSED, *([ACCEPTED] if is_explained(answer) else [])])
        return []

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
            if mode is schemathesis.GenerationMode.POSITIVE:
                case.body = for_us(case.body, self.there)
            if case.headers.get(TIMEOUT, "").strip("0").isdigit():
                case.headers[TIMEOUT] = "20000"  # a 504 after a millisecond tells nothing
            if case.headers.get(MAX_LOAD, "").isdigit():
                case.headers[MAX_LOAD] = "20000"  # nor does a 503 for an adapter that is being loaded
            answer = case.call(base_url=self.url, session=self.session, headers=self.headers, timeout=60)
            self.statuses[answer.status_code] += 1
            self.accepted[operation.label] += answer.status_code < 300
            case.validate_response(answer, checks=self.checks, excluded_checks=self._not_for(case, answer))

        check()


def for_us(body: Any, there: dict[str, str]) -> Any:
    """A body with the model or the version that is there, so that it is not refused for that, and with whole numbers as
    integers: to JSON Schema 1.0 is an integer, to most readers of JSON it is not, and here it is refused."""
    body = with_integers(body)
    if isinstance(body, dict) and "model" in body:
        return body | {"model": there["id"]}
    if isinstance(body, dict) and "targets" in body:
        heaviest = max(body["targets"], key=lambda target: target["weight"])
        return body | {"targets": [heaviest | {"version": there["version"]}]}
    return body


def with_integers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: with_integers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [with_integers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def is_mended(body: Any) -> bool:
    """Whether earlier turns of a conversation are not as the document has them, which are taken all the same."""
    return isinstance(body, dict) and (
        body.get("messages") != history.mended(body.get("messages"))
        or body.get("messages") != messages_history.mended(body.get("messages"))
        or body.get("input") != responses_history.mended(body.get("input"))
    )


def is_explained(answer: Any) -> bool:
    if answer.status_code < 400:
        return False
    said = answer.json()
    said = said.get("error", said)
    if "/v1/messages" in answer.request.path_url:
        return any(words in said["message"] for words in EXPLAINED_MESSAGES)
    param = said.get("param") and re.sub(r"(\.\d+)+$", "", re.sub(r"\[\d+\]", "[]", said["param"]))
    given = (answer.status_code, said.get("code"), param)
    return any(
        all(part in (None, mine) for part, mine in zip(known, given, strict=True))
        for known in REFUSED_ALL_THE_SAME
    )


def call_everything(server: WholeServer, port: str, *, max_examples: int, seed: int) -> Caller:
    """Every operation: with valid data for what is there, with invalid data, and with valid data for what is not."""
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
            path = {name: caller.there[name] for name in names} if is_there else None
            caller.run(operation, mode, path, max_examples, seed)
    return caller


@pytest.mark.slow
@pytest.mark.parametrize("port", ["data", "admin"])
def test_both_ports_answer_as_documented(own: WholeServer, port: str) -> None:
    caller = call_everything(own, port, max_examples=3, seed=1)
    assert caller.statuses[200] > 20
    assert caller.statuses[400] > 10


@pytest.mark.soak
@pytest.mark.parametrize("port", ["data", "admin"])
def test_both_ports_answer_as_documented_long(own: WholeServer, port: str) -> None:
    caller = call_everything(own, port, max_examples=100, seed=2)
    statuses = caller.statuses
    never = {found.label for found in caller.operations if not caller.accepted[found.label]}
    assert never <= NEVER_ACCEPTED
    print(f"\nschemathesis, {port} port: {sum(statuses.values())} requests, {dict(sorted(statuses.items()))}")
