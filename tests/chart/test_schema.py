"""The schema of the chart's values has every setting of the product and no secret, and refuses unknown keys."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any

import jsonschema
import pytest
import yaml

from loraplex.app.setting_types import parse_size
from loraplex.app.settings import SECRET_SETTINGS, Settings
from support.chart.helm import CHART, NEEDED, SEVERAL, VALUE_SETS, load, merged
from support.markdown import ROOT

SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text("utf-8"))
DEFAULTS: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
VALIDATOR = jsonschema.Draft7Validator(SCHEMA)


def tool() -> ModuleType:
    spec = spec_from_file_location("chart_settings", ROOT / "tools/chart_settings.py")
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


chart_settings = tool()


def problems(*values: dict[str, Any]) -> list[str]:
    """What the schema says of values over the defaults; a null takes a default away, as Helm does it."""
    return [error.message for error in VALIDATOR.iter_errors(_without_nulls(merged(DEFAULTS, *values)))]


def _without_nulls(values: Any) -> Any:
    if isinstance(values, dict):
        return {key: _without_nulls(value) for key, value in values.items() if value is not None}
    return values


def test_the_settings_are_those_of_the_product() -> None:
    text = (CHART / "values.schema.json").read_text("utf-8")
    assert text == chart_settings.with_settings(json.loads(text)), "run python tools/chart_settings.py"


def test_every_setting_is_a_value_or_a_secret() -> None:
    settings = set(SCHEMA["properties"]["settings"]["properties"])
    assert settings == Settings.model_fields.keys() - SECRET_SETTINGS
    by_reference = {re.sub(r"(?=[A-Z])", "_", name).lower() for name in DEFAULTS["secrets"]}
    # The headers for a collector are the standard variable's, as the hub's token is.
    assert by_reference == SECRET_SETTINGS | {"hf_token", "engine_token", "otlp_headers"}


def test_the_schema_is_one_and_takes_the_defaults_and_every_value_set() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    assert problems() == []
    for path in VALUE_SETS:
        assert problems(load(path)) == [], path.name


def test_defaults_that_repeat_the_products_are_its() -> None:
    chosen = {"host", "admin_host", "data_dir", "model"}
    """Those in which a pod differs."""
    for name in DEFAULTS["settings"].keys() - chosen:
        assert DEFAULTS["settings"][name] == Settings.model_fields[name].default, name
    assert set(chart_settings.REQUIRED) == DEFAULTS["settings"].keys()


@pytest.mark.parametrize(
    "size",
    [
        "0",
        "17",
        "2GiB",
        "2gib",
        " 512 MiB ",
        "1.5g",
        "3kB",
        "1b",
        "2K",
        "1Gi",
        "x",
        "1.GiB",
        "-1",
        "2TiB",
        "",
    ],
)
def test_sizes_are_those_that_the_product_reads(size: str) -> None:
    try:
        read = isinstance(parse_size(size), int)
    except ValueError:
        read = False
    assert (problems({"settings": {"kv_cache_memory": size}}) == []) == read


@pytest.mark.parametrize("port", [8002, "8002", "0.0.0.0:8002"])
def test_the_engine_port_is_a_number_or_a_text_with_its_host(port: int | str) -> None:
    assert problems({"settings": {"engine_port": port}}) == []


def places(
    values: dict[str, Any], schema: dict[str, Any], at: tuple[str, ...] = ()
) -> Iterator[tuple[str, ...]]:
    """Every map among the defaults whose keys are the chart's, not the operator's own."""
    schema = _resolved(schema)
    if schema.get("additionalProperties") is False:
        yield at
    for key, value in values.items():
        if isinstance(value, dict) and key in schema.get("properties", {}):
            yield from places(value, schema["properties"][key], (*at, key))


def _resolved(schema: dict[str, Any]) -> dict[str, Any]:
    if "$ref" not in schema:
        return schema
    found: dict[str, Any] = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
    return found


def nested(at: tuple[str, ...], value: Any) -> dict[str, Any]:
    for key in reversed(at):
        value = {key: value}
    assert isinstance(value, dict)
    return value


def test_an_unknown_key_is_refused_everywhere() -> None:
    found = list(places(DEFAULTS, SCHEMA))
    assert len(found) > 20
    for at in found:
        assert problems(nested((*at, "keyThatIsNot"), 1)), at


@pytest.mark.parametrize(
    "values",
    [
        {"settings": {"database_url": "postgresql://user:password@host/name"}},
        {"settings": {"admin_token": "secret"}},
        {"secrets": {"databaseUrl": {"value": "postgresql://user:password@host/name"}}},
        {"extraEnv": [{"name": "LORAPLEX_DATABASE_URL", "value": "postgresql://user:password@host/name"}]},
    ],
    ids=["setting", "token", "value", "variable"],
)
def test_a_secret_is_refused_as_a_value(values: dict[str, Any]) -> None:
    assert problems(values)


@pytest.mark.parametrize(
    "values",
    [
        {"replicas": "two"},
        {"replicas": -1},
        {"settings": {"max_num_seqs": "many"}},
        {"settings": {"max_num_seqs": 0}},
        {"settings": {"device": "tpu"}},
        {"settings": {"engine_spare": "yes"}},
        {"settings": {"port": 0}},
        {"settings": {"admin_port": 80}},
        {"settings": {"data_dir": "data"}},
        {"settings": {"data_dir": "/data"}},
        {"settings": {"drain_grace": None}},
        {"image": {"digest": "sha256:0"}},
        {"persistence": {"size": "much"}},
        {"resources": {"limits": {"cpu": "-1"}}},
        {"runAs": {"user": 0}},
        {"service": {"admin": {"type": "LoadBalancer"}}},
        {"autoscaling": {"provider": "both"}},
        {"prometheusRule": {"runbookUrl": "https://example.com/"}},
        {"prometheusRule": {"thresholds": {"errorRatio": 5}}},
        {"extraEnv": [{"name": "TMPDIR", "value": "/"}]},
        {"extraVolumes": [{"name": "data", "emptyDir": {}}]},
        {"ingress": None},
    ],
    ids=repr,
)
def test_a_wrong_value_is_refused(values: dict[str, Any]) -> None:
    assert problems(NEEDED, SEVERAL) == []
    assert problems(NEEDED, SEVERAL, values)
