"""What the documents say of the interface is so: routes, fields, headers, errors, metrics, and adapters' configs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from prometheus_client.parser import text_string_to_metric_families

from loraplex.adapters.cache.residency import CacheEntry
from loraplex.adapters.cache.tenant_memory import TenantBytes
from loraplex.adapters.errors import AdapterRefused, RefusalCode
from loraplex.admin.app import PREFIX, admin_routes
from loraplex.admin.framework.openapi import openapi_document
from loraplex.admin.problem import ANSWERS as ADMIN_ANSWERS
from loraplex.api.application import EXPOSED_HEADERS, create_data_app
from loraplex.api.deps import ApiServices
from loraplex.api.drain import Drain
from loraplex.api.errors import ANSWERS as DATA_ANSWERS
from loraplex.api.metrics import EngineSnapshot, Metrics
from loraplex.api.metrics.cluster_metrics import ClusterSnapshot
from loraplex.api.openai import messages, schemas
from loraplex.api.routes.probes import probe_routes
from loraplex.control.background import BackgroundTasks, TaskState
from loraplex.control.batches.batches import Batches
from loraplex.control.batches.files import Files
from loraplex.control.types import SCOPES, Limits, ReachedLimit
from loraplex.control.usage.outcome import Outcome
from loraplex.engine.reports import EngineStats, TenantStats
from loraplex.engine.types import Timing
from loraplex.http.application import create_app
from loraplex.serving.text.processor import TextProcessor
from support import markdown
from support.adapters.drafts import ALL_SITES, peft_config, site_module
from support.adapters.whole_reads import parse_peft_config
from support.clients import vllm_metrics
from support.control.usage import ended
from support.engine.fake_engine import FakeEngineClient, fake_engine_info
from support.http.admin_plane import AdminPlane
from support.http.data_plane import (
    BASE,
    FakeAdapters,
    FakeAuthenticator,
    FakeGrammars,
    FakeLedger,
    FakeLimiter,
    FakeResolver,
    file_database,
    ref,
)
from support.http.route_tables import routes_of
from support.models.byte_tokenizer import write_byte_tokenizer
from support.placement.fake_cluster import fake_report
from tools.support_page import END, render

API, ADMIN = markdown.read("docs/api.md"), markdown.read("docs/admin.md")


def bare(cell: str) -> str:
    assert cell.startswith("`"), cell
    assert cell.endswith("`"), cell
    return cell[1:-1]


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[AdminPlane]:
    made = AdminPlane(tmp_path)
    yield made
    made.close()


# Routes.


def test_every_route_of_the_data_plane(tmp_path: Path) -> None:
    services = ApiServices(
        engine=FakeEngineClient(),
        text=TextProcessor(write_byte_tokenizer(tmp_path), max_model_len=256),
        grammars=FakeGrammars(),
        authenticator=FakeAuthenticator(),
        resolver=FakeResolver(),
        limiter=FakeLimiter(),
        ledger=FakeLedger(),
        adapters=FakeAdapters(),
        database=(database := file_database(tmp_path)),
        files=Files(database),
        batches=Batches(database),
        metrics=Metrics(BASE),
        drain=Drain(),
        served_model_name=BASE,
        max_model_len=256,
        metrics_on_data_port=True,
    )
    documented = {bare(cells[0]) for cells in markdown.rows(API, "route", "what it does")}
    assert documented == {label for label, _ in routes_of(create_data_app(services))}


def test_every_route_of_the_admin_plane_and_its_permission(plane: AdminPlane) -> None:
    documented = {
        bare(cells[0]): cells[1].strip("`")
        for cells in markdown.rows(ADMIN, "route", "needs", "what it does")
    }
    routes = admin_routes()
    actual: dict[str, str] = {f"{route.method} {route.path}": route.access for route in routes}
    for route in probe_routes(plane.engine, Drain()):
        actual[f"GET {route.path}"] = "nothing"
    pages = ("GET /", "GET /console/{file}", "GET /openapi.json", "GET /docs", "GET /metrics")
    actual |= dict.fromkeys(pages, "nothing")
    assert documented == actual
    described = {
        f"{method.upper()} {path}"
        for path, methods in openapi_document(create_app("admin", routes))["paths"].items()
        for method in methods
    }
    assert described == {name for name, access in actual.items() if access != "nothing"}


def test_paths_in_examples_are_routes() -> None:
    known = [route.path for route in admin_routes()]
    patterns = [re.compile(re.sub(r"\{\w+\}", "[^/]+", path)) for path in known]
    text = markdown.blocks(ADMIN)
    given = {**dict(re.findall(r"^(V|R)=\$ADMIN(\S+)", text, re.MULTILINE)), "ADMIN": ""}
    asked = re.findall(r"\$(ADMIN|V|R)((?:/[\w.%-]+)*)", text)
    assert len(asked) > 20
    for name, rest in asked:
        path = PREFIX + given[name] + rest
        assert any(pattern.fullmatch(path) for pattern in patterns), path


# Fields, headers, errors.


def test_every_request_field(plane: AdminPlane) -> None:
    documented = {bare(cells[0]) for cells in markdown.rows(API, "field", "values", "note")}
    fields = schemas.ChatRequest.model_fields | schemas.CompletionRequest.model_fields
    assert documented == fields.keys()
    assert set(messages.Message.model_fields) <= set(markdown.spans(API))
    unsupported: dict[str, dict[str, list[object]]] = {}
    where = ""
    for cells in markdown.rows(API, "where", "fields (with their own neutral values)"):
        where = cells[0] or where
        for name, values in re.findall(r"`(\w+)`(?: \(([^)]*)\))?", cells[1]):
            neutral = [json.loads(value) for value in re.findall(r"`([^`]+)`", values)]
            unsupported.setdefault(where, {})[name] = neutral
    actual = {
        "chat": schemas.UNSUPPORTED_CHAT,
        "completions": schemas.UNSUPPORTED_COMPLETION,
        "a message": messages.UNSUPPORTED_MESSAGE,
    }
    assert unsupported == {
        where: {name: list(values) for name, values in fields.items()} for where, fields in actual.items()
    }
    assert schemas.StreamOptions.UNSUPPORTED.keys() <= set(markdown.spans(API))


def test_every_answer_header() -> None:
    documented = {bare(cells[0]) for cells in markdown.rows(API, "header", "when", "meaning")}
    assert documented == set(EXPOSED_HEADERS)


def test_every_error_of_the_data_plane() -> None:
    rows = markdown.rows(API, "status", "code", "when, and what to do")
    documented = {bare(cells[1]): int(cells[0]) for cells in rows}
    assert documented == {code: status for code, (status, _) in DATA_ANSWERS.items()}


def test_every_error_of_the_admin_plane() -> None:
    refusals = {bare(cells[0]) for cells in markdown.rows(ADMIN, "code", "what it means", "what to do")}
    assert refusals == set(get_args(RefusalCode))
    others = {bare(cells[1]): int(cells[0]) for cells in markdown.rows(ADMIN, "status", "code", "when")}
    actual = {code: status for code, (status, _) in ADMIN_ANSWERS.items()}
    assert others == {code: status for code, status in actual.items() if code not in refusals}
    assert {actual[code] for code in refusals - {"too_large"}} == {422}
    assert actual["too_large"] == 413


def test_every_scope_limit_and_state() -> None:
    said = set(markdown.spans(ADMIN))
    assert set(SCOPES) <= said
    limits = {
        name for cells in markdown.rows(ADMIN, "limit", "of", "meaning") for name in markdown.spans(cells[0])
    }
    assert limits == set(Limits.__dataclass_fields__)
    states = {name for cells in markdown.rows(ADMIN, "state", "meaning") for name in markdown.spans(cells[0])}
    described = openapi_states()
    assert states == described


def openapi_states() -> set[str]:
    from loraplex.admin.schemas.adapters import Version

    return set(Version.model_json_schema()["properties"]["state"]["enum"])


# Metrics.


def a_scrape(*, tenant_data: bool, residency: bool = False) -> dict[str, tuple[str, frozenset[str]]]:
    """Type and labels of each metric, of a server where everything has happened once."""
    metrics = Metrics(BASE, residency=residency)
    timing = Timing(0.1, 0.2, 0.3)
    metrics.first_token(0.1)
    metrics.next_tokens(0.1, 2)
    metrics.sequence_ended(
        "acme",
        "stop",
        prompt_tokens=3,
        completion_tokens=2,
        cached_tokens=1,
        max_tokens=16,
        seconds=1.0,
        timing=timing,
    )
    metrics.request_answered("acme", ref("acme", "pirate", 1), 200)
    metrics.shared_with_base("acme", ref("acme", "pirate", 1), 16)
    metrics.arms.ended(Outcome.of(ended(adapter="pirate", version=2)))
    metrics.refused_by_limit("acme", "rate_limit_exceeded")
    metrics.limits_decided("rate_limit_exceeded", 0.001, ReachedLimit("tenant", "requests"))
    metrics.responded(200)
    metrics.admin_changed("release.set")
    metrics.version_checked("rejected")
    metrics.stream_cut("gone")
    tasks = BackgroundTasks()
    tasks.watch(TaskState("a task"))
    metrics.watch_background(tasks)
    metrics.watch_disks({"data": markdown.ROOT})
    entry = CacheEntry(ref("acme", "pirate", 1), "hot", load_seconds={"disk": 0.1, "copy": 0.02})
    stats = EngineStats(tenants={"acme": TenantStats(1, 1, 2.0)}, tenant_bytes={"acme": TenantBytes(1, 1)})
    cluster = ClusterSnapshot(1, [fake_report("replica-1")], {"replica-1": stats})
    snapshot = EngineSnapshot(fake_engine_info(), stats, [entry], True, 0, cluster)
    text = metrics.render(snapshot, tenant_data=tenant_data).decode()
    found = {}
    for family in text_string_to_metric_families(text):
        labels = frozenset(label for sample in family.samples for label in sample.labels) - {"le"}
        name = family.name
        if not name.endswith("_created"):
            found[f"{name}_total" if family.type == "counter" else name] = (family.type, labels)
    return found


def documented_metrics(metric: str = "metric") -> dict[str, tuple[str, frozenset[str]]]:
    text = markdown.read("docs/metrics.md")
    found = {}
    for cells in markdown.rows(text, metric, "type", "labels", "meaning"):
        labels = frozenset(markdown.spans(cells[2]))
        if cells[2] == "see below":
            below = next(part for part in re.split(r"\.\s", text) if f"{cells[0]} has" in part)
            labels = frozenset(re.findall(r"`([a-z_]+)`", below.split(f"{cells[0]} has")[1]))
        else:
            assert labels or cells[2] == "(none)", cells[0]
        found[bare(cells[0])] = (cells[1], labels)
    return found


def test_every_metric_with_type_and_labels() -> None:
    assert documented_metrics() == a_scrape(tenant_data=True)


def test_metrics_without_tenant_data_are_those_of_vllm() -> None:
    documented = documented_metrics()
    assert a_scrape(tenant_data=False).keys() == {name for name in documented if name.startswith("vllm:")}


@pytest.mark.parametrize("tenant_data", [False, True])
def test_every_metric_of_residency(tenant_data: bool) -> None:
    more = a_scrape(tenant_data=tenant_data, residency=True)
    assert {name: more[name] for name in more.keys() - a_scrape(tenant_data=tenant_data).keys()} == (
        documented_metrics("metric of residency")
    )


def metrics_that_are_not_served() -> set[str]:
    rows = markdown.rows(markdown.read("docs/metrics.md"), "vLLM's metric", "why not")
    return {name for cells in rows for name in markdown.spans(cells[0])}


def test_every_metric_of_vllm_is_served_or_said_not_to_be() -> None:
    served, not_served = set(documented_metrics()), metrics_that_are_not_served()
    assert served & not_served == set()
    assert vllm_metrics.SERVED_ALWAYS - served == not_served
    assert {name for name in served if name.startswith("vllm:")} <= vllm_metrics.SERVED_ALWAYS


def test_metrics_named_anywhere_exist() -> None:
    known = documented_metrics().keys() | metrics_that_are_not_served()
    known |= documented_metrics("metric of residency").keys()
    for path in (markdown.ROOT / "docs").rglob("*.md"):
        for name in re.findall(r"\b((?:vllm:|loraplex_)[a-z_0-9]+)", path.read_text("utf-8")):
            base = re.sub(r"_(count|sum|bucket|created)$", "", name)
            assert base in known or name in known or name.endswith("_"), f"{path.name}: {name}"


# Adapters.

CONFIG_ROWS = markdown.rows(
    markdown.read("docs/peft-support.md"), "field", "accepted", "refused, for example", "code"
)


def test_the_page_of_what_is_served_is_printed_from_the_code() -> None:
    assert markdown.read("docs/peft-support.md").startswith(render() + END), (
        "run python -m tools.support_page"
    )


def config_of(field: str, value: object) -> dict[str, Any]:
    """An adapter_config.json with this value; those fields beside it that it needs."""
    return peft_config(**{field: value})


@pytest.mark.parametrize("cells", CONFIG_ROWS, ids=lambda cells: cells[0])
def test_configs_are_accepted_and_refused_as_documented(tmp_path: Path, cells: list[str]) -> None:
    field = bare(cells[0])
    modules = [site_module(layer, site) for layer in range(4) for site in ALL_SITES]
    path = tmp_path / "adapter_config.json"
    accepted = [json.loads(value) for value in markdown.spans(cells[1])]
    refused = [json.loads(value) for value in markdown.spans(cells[2])]
    assert accepted
    assert bool(refused) == (cells[3] != "none")
    for value in accepted:
        path.write_text(json.dumps(config_of(field, value)))
        parse_peft_config(path, modules)
    for value in refused:
        path.write_text(json.dumps(config_of(field, value)))
        with pytest.raises(AdapterRefused) as caught:
            parse_peft_config(path, modules)
        assert caught.value.code in markdown.spans(cells[3]), value
        assert caught.value.feature in (None, field), value


def test_an_unlisted_field_is_neutral_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "adapter_config.json"
    for value in (None, False, "", [], {}):
        path.write_text(json.dumps(config_of("a_field_of_tomorrow", value)))
        parse_peft_config(path, [site_module(0, "q_proj")])
    path.write_text(json.dumps(config_of("a_field_of_tomorrow", 1)))
    with pytest.raises(AdapterRefused) as caught:
        parse_peft_config(path, [site_module(0, "q_proj")])
    assert (caught.value.code, caught.value.feature) == ("unsupported_feature", "a_field_of_tomorrow")
