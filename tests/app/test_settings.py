"""Where settings come from, and what is said of wrong ones."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from loraplex.app.cli import create_cli
from loraplex.app.removed_settings import REMOVED_SWITCHES, instead_of, removed_settings
from loraplex.app.setting_groups import EXPERT, GROUPS
from loraplex.app.setting_types import server_limits
from loraplex.app.settings import Settings, SettingsInvalid, load_settings
from loraplex.control.types import Limits

OTHER: dict[str, tuple[str, Any]] = {
    "model": ("/models/x", "/models/x"),
    "served_model_name": ("org/name", "org/name"),
    "tokenizer": ("file", "file"),
    "tool_format": ("hermes", "hermes"),
    "reasoning_format": ("none", "none"),
    "host": ("0.0.0.0", "0.0.0.0"),
    "port": ("9000", 9000),
    "public_url": ("https://llm.example.com/x/", "https://llm.example.com/x"),
    "admin_host": ("::1", "::1"),
    "admin_port": ("9001", 9001),
    "engine_port": ("0.0.0.0:9002", "0.0.0.0:9002"),
    "engine_token_file": ("/run/secrets/engine", "/run/secrets/engine"),
    "engine_tls": ("/run/secrets/tls", "/run/secrets/tls"),
    "data_dir": ("/var/lib/loraplex", Path("/var/lib/loraplex")),
    "device": ("cpu", "cpu"),
    "dtype": ("float32", "float32"),
    "quantise": ("int8", "int8"),
    "max_model_len": ("4096", 4096),
    "max_num_seqs": ("7", 7),
    "max_num_batched_tokens": ("128", 128),
    "max_step_ms": ("80", 80),
    "max_waiting": ("9", 9),
    "kv_cache_memory": ("2GiB", 2 << 30),
    "kv_cache_dtype": ("int8", "int8"),
    "kv_host_memory": ("64MiB", 64 << 20),
    "kv_disk": ("/var/cache/kv,bytes=50GiB", "/var/cache/kv,bytes=50GiB"),
    "state_cache": ("32MiB", 32 << 20),
    "adapter_memory": ("64MiB", 64 << 20),
    "adapter_cpu_memory": ("65 MiB", 65 << 20),
    "max_adapter_rank": ("32", 32),
    "max_adapter_upload": ("10MB", 10_000_000),
    "default_max_tokens": ("17", 17),
    "adapter_templates": ("own", "own"),
    "adapter_towers": ("refuse", "refuse"),
    "max_body": ("1MiB", 1 << 20),
    "server_limit": ("max_concurrency=3, token_budget=9", ["max_concurrency=3", "token_budget=9"]),
    "speculation": ("off", "off"),
    "threads": ("3", 3),
    "replicas": ("2", 2),
    "max_replicas": ("5", 5),
    "ray_address": ("10.0.0.1:6379", "10.0.0.1:6379"),
    "kernels": ("torch", "torch"),
    "attention": ("triton", "triton"),
    "batch_invariant": ("true", True),
    "engine_spare": ("false", False),
    "database_url": ("sqlite:////x/y.db", "sqlite:////x/y.db"),
    "database_staleness": ("60", 60.0),
    "redis_url": ("redis://h:1/2", "redis://h:1/2"),
    "limits_when_apart": ("strict", "strict"),
    "artifact_url": ("file:///x", "file:///x"),
    "artifact_cache_size": ("3GiB", 3 << 30),
    "keep_versions": ("3", 3),
    "adapter_sources": ("file:///srv/a, file:///srv/{tenant}", ["file:///srv/a", "file:///srv/{tenant}"]),
    "admin_token": ("a-token", "a-token"),
    "key_pepper": ("0a" * 32, "0a" * 32),
    "cors_origins": ("https://a.example, https://b.example", ["https://a.example", "https://b.example"]),
    "metrics_on_data_port": ("true", True),
    "residency_metrics": ("true", True),
    "usage_journal_size": ("32MiB", 32 << 20),
    "usage_keep_days": ("7", 7),
    "drain_grace": ("1.5", 1.5),
    "drain_timeout": ("7", 7.0),
    "otlp_endpoint": ("http://collector:4318", "http://collector:4318"),
    "trace_sample_ratio": ("0.25", 0.25),
    "webhook_url": ("https://hooks.example.com/x?y=1", "https://hooks.example.com/x?y=1"),
    "webhook_secret": ("0123456789abcdef", "0123456789abcdef"),
    "webhook_allow": ("hooks.internal, 10.0.0.0/8", ["hooks.internal", "10.0.0.0/8"]),
    "log_level": ("debug", "debug"),
}
"""A value of every setting that is not its default: as text, and as what it is read as."""


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("LORAPLEX_"):
            monkeypatch.delenv(name)


def from_cli(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Settings:
    """What `loraplex serve` with these arguments would serve with."""
    seen: list[Settings] = []
    monkeypatch.setattr("loraplex.app.serve.serve", lambda settings: seen.append(settings) or 0)
    done = CliRunner().invoke(create_cli(), ["serve", *arguments])
    assert done.exit_code == 0, done.output
    return seen[0]


def toml(path: Path, values: Mapping[str, str]) -> Path:
    path.write_text("".join(f'{name} = "{value}"\n' for name, value in values.items()))
    return path


def test_the_table_above_is_whole() -> None:
    assert set(OTHER) == set(Settings.model_fields)
    for name, (_, value) in OTHER.items():
        assert getattr(Settings(), name) != value, name


def test_every_setting_is_reached_from_all_three(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    expected = {name: value for name, (_, value) in OTHER.items()}
    texts = {name: text for name, (text, _) in OTHER.items()}
    file = toml(tmp_path / "all.toml", texts)
    assert load_settings({}, file).model_dump() == expected
    with monkeypatch.context() as patch:
        for name, text in texts.items():
            patch.setenv(f"LORAPLEX_{name.upper()}", text)
        assert load_settings({}).model_dump() == expected
    options = []
    for name, text in texts.items():
        option = f"--{name.replace('_', '-')}"
        options += [f"{option}={text}"] if Settings.model_fields[name].annotation is bool else [option, text]
    assert from_cli(monkeypatch, *options).model_dump() == expected
    # And the file by its option and by its variable.
    assert from_cli(monkeypatch, "--config", str(file)).model_dump() == expected
    monkeypatch.setenv("LORAPLEX_CONFIG", str(file))
    assert from_cli(monkeypatch).model_dump() == expected


def test_a_file_may_have_plain_types_and_dashes(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('max-num-seqs = 5\nmetrics_on_data_port = true\ncors_origins = ["https://a.example"]\n')
    settings = load_settings({}, file)
    assert (settings.max_num_seqs, settings.metrics_on_data_port) == (5, True)
    assert settings.cors_origins == ["https://a.example"]


def test_the_command_line_beats_the_environment_beats_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = toml(tmp_path / "a.toml", {"port": "1", "admin_port": "1", "max_num_seqs": "1"})
    monkeypatch.setenv("LORAPLEX_PORT", "2")
    monkeypatch.setenv("LORAPLEX_ADMIN_PORT", "2")
    settings = from_cli(monkeypatch, "--port", "3", "--config", str(file))
    assert (settings.port, settings.admin_port, settings.max_num_seqs, settings.max_waiting) == (
        3,
        2,
        1,
        1024,
    )
    monkeypatch.setenv("LORAPLEX_PORT", "")  # empty is not given
    assert load_settings({}, file).port == 1


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1048576", 1 << 20),
        ("512MiB", 512 << 20),
        ("512 mib", 512 << 20),
        ("1.5g", 3 << 29),
        ("2GB", 2 * 10**9),
        ("3k", 3 << 10),
        (" 7 B ", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert load_settings({"kv_cache_memory": text}).kv_cache_memory == size


def test_the_largest_upload_is_a_size_or_auto() -> None:
    assert load_settings({}).max_adapter_upload == "auto"
    assert load_settings({"max_adapter_upload": "auto"}).max_adapter_upload == "auto"
    assert load_settings({"max_adapter_upload": "3GiB"}).max_adapter_upload == 3 << 30
    for text in ("all", "1"):
        assert refused({"max_adapter_upload": text}).startswith("--max-adapter-upload: ")


@pytest.mark.parametrize("text", ["2 parsecs", "-1", "1e9", "lots", "GiB", "1.5", "0x10"])
def test_invalid_sizes_are_refused(text: str) -> None:
    if text == "1.5":  # a byte and a half is a byte
        assert load_settings({"kv_cache_memory": text}).kv_cache_memory == 1
        return
    with pytest.raises(SettingsInvalid, match="--kv-cache-memory"):
        load_settings({"kv_cache_memory": text})


def test_what_is_no_size_is_told_how_one_is_written() -> None:
    for text in ("lots", "1e9", "", "-1"):
        said = refused({"kv_cache_memory": text})
        assert said.startswith("--kv-cache-memory: must be bytes, such as 1048576, 512MiB or 2GiB (got "), (
            text
        )


def refused(given: dict[str, Any], file: Path | None = None) -> str:
    with pytest.raises(SettingsInvalid) as caught:
        load_settings(given, file)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_errors_name_their_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = toml(tmp_path / "a.toml", {"max_waiting": "0"})
    monkeypatch.setenv("LORAPLEX_MAX_NUM_SEQS", "none")
    said = refused({"port": "70000"}, file)
    assert "--port: " in said
    assert "65535" in said
    assert "'70000'" in said
    assert "LORAPLEX_MAX_NUM_SEQS: " in said
    assert "max_waiting in the config file: " in said
    # A wrong value that another source overrules is no error.
    assert load_settings({"max_num_seqs": "4", "max_waiting": "5"}, file).max_num_seqs == 4


def test_a_secret_does_not_show_in_an_error() -> None:
    assert "s3cret" not in refused({"admin_token": ["s3cret"]})


def test_unknown_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "'frobnicate'" in refused({}, toml(tmp_path / "a.toml", {"frobnicate": "1"}))
    broken = tmp_path / "b.toml"
    broken.write_text("port = = 1")
    assert f"{broken} cannot be read as TOML: Invalid value (at line 1, column 8)." in refused({}, broken)
    assert str(tmp_path / "none.toml") in refused({}, tmp_path / "none.toml")
    assert str(tmp_path) in refused({}, tmp_path)
    monkeypatch.setenv("LORAPLEX_URL", "http://x")  # another command's
    load_settings({})
    monkeypatch.setenv("LORAPLEX_FOO", "1")
    assert "LORAPLEX_FOO" in refused({})
    assert "did you mean" not in refused({})


def test_a_switch_is_no_number(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("port = true\nkv_cache_memory = false\n")
    said = refused({}, file)
    assert "port in the config file: takes a value, not true or false (got true)" in said
    assert "kv_cache_memory in the config file: takes a value" in said
    file.write_text("batch_invariant = true\n")
    assert load_settings({}, file).batch_invariant


def test_an_unknown_key_is_told_the_nearest_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = refused({}, toml(tmp_path / "a.toml", {"kv-cache-memry": "1GiB"}))
    assert said.startswith(
        "'kv_cache_memry' is no setting, did you mean 'kv_cache_memory'?; 'loraplex serve --help'"
    )
    monkeypatch.setenv("LORAPLEX_MAX_NUM_SEQ", "8")
    monkeypatch.setenv("LORAPLEX_API_KYE", "lpx_x")
    said = refused({})
    assert "LORAPLEX_MAX_NUM_SEQ is no setting, did you mean 'LORAPLEX_MAX_NUM_SEQS'?" in said
    assert "LORAPLEX_API_KYE is no setting, did you mean 'LORAPLEX_API_KEY'?" in said


@pytest.mark.parametrize(
    ("text", "shown"), [("true", "true"), ("[1, 'a']", '[1, "a"]'), ("'it''s'", "'it"), ("1.5", "1.5")]
)
def test_a_wrong_value_is_shown_as_the_file_has_it(tmp_path: Path, text: str, shown: str) -> None:
    """Not as Python writes it."""
    file = tmp_path / "a.toml"
    file.write_text(f"device = {text}\n" if "''" not in text else 'device = "it\'s"\n')
    assert f"(got {shown}" in refused({}, file)


def shown_by(option: str) -> str:
    return CliRunner().invoke(create_cli(), ["serve", option], env={"COLUMNS": "250"}).output


def test_the_help_lists_every_setting() -> None:
    """`--help` those that people set, in panels; `--help-all` all of them."""
    brief, full = shown_by("--help"), shown_by("--help-all")
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(Settings.model_fields)
    for name, field in Settings.model_fields.items():
        option = f"--{name.replace('_', '-')} "
        assert option in full or f"{option.strip()}/" in full or f"{option.strip()}," in full
        assert (option in brief or option.replace(" ", "/") in brief) is (name not in EXPERT), name
        assert field.description
    for panel in GROUPS:
        assert f"\n{panel}:\n" in brief
    assert "--help-all" in brief


def test_limits_of_the_server_are_one_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = Limits(tokens_per_minute=500, max_concurrency=3, token_budget=9, budget_period="month")
    texts = ["tokens-per-minute=500", "max_concurrency = 3", "token_budget=9", "max_sequences=0"]
    options = [part for text in texts for part in ("--server-limit", text)]
    assert server_limits(from_cli(monkeypatch, *options).server_limit) == asked
    file = tmp_path / "a.toml"
    file.write_text("[server_limit]\ntokens_per_minute = 500\nmax_concurrency = 3\ntoken_budget = 9\n")
    assert server_limits(load_settings({}, file).server_limit) == asked
    monkeypatch.setenv("LORAPLEX_SERVER_LIMIT", ",".join(texts))
    assert server_limits(from_cli(monkeypatch).server_limit) == asked
    assert server_limits(["token_budget=9", "budget_period=day"]).budget_period == "day"
    assert server_limits(["budget_period=day"]) == Limits()


def test_a_limit_of_the_command_line_leaves_others_of_the_environment_and_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "a.toml"
    file.write_text("[server_limit]\ntokens_per_minute = 500\nmax_concurrency = 3\nmax_sequences = 8\n")
    monkeypatch.setenv("LORAPLEX_SERVER_LIMIT", "max-concurrency=4,requests_per_minute=9")
    read = load_settings({"server_limit": ["requests_per_minute=7", "max_sequences=0"]}, file)
    assert server_limits(read.server_limit) == Limits(
        requests_per_minute=7, tokens_per_minute=500, max_concurrency=4
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            "tokens_per_minut=5",
            r"there is no limit 'tokens_per_minut', did you mean 'tokens_per_minute'.*; NAME is one of",
        ),
        ("max_adapters=5", "there is no limit 'max_adapters'"),
        ("max_sequences", "'max_sequences' has no value: say max_sequences=VALUE"),
        ("max_sequences=-1", "max_sequences must be a whole number"),
        ("budget_period=year", "budget_period must be one of hour, day"),
    ],
)
def test_a_wrong_limit_of_the_server_is_named(given: str, said: str) -> None:
    with pytest.raises(SettingsInvalid, match=f"--server-limit: {said}"):
        load_settings({"server_limit": [given]})


def test_there_are_at_most_68_settings_and_the_first_are_those_that_operators_touch() -> None:
    # Each has users; the 68th is --kv-disk, a folder that only the operator can name. Its size and key are parts of it.
    assert len(Settings.model_fields) <= 68
    options = re.findall(r"^  --([a-z-]+)", shown_by("--help"), re.MULTILINE)
    names = [name for names in GROUPS.values() for name in names if name not in EXPERT]
    assert [name.replace("-", "_") for name in options[: len(names)]] == names
    assert next(iter(GROUPS)) == "First"


@pytest.mark.parametrize("name", removed_settings())
def test_a_setting_that_was_taken_away_says_what_to_use(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert name not in Settings.model_fields
    option = f"--{name.replace('_', '-')}"
    value = [] if name in REMOVED_SWITCHES else ["1"]
    answers = [CliRunner().invoke(create_cli(), ["serve", option, *value], env={"COLUMNS": "250"}).output]
    answers.append(refused({}, toml(tmp_path / "a.toml", {name: "1"})))
    monkeypatch.setenv(f"LORAPLEX_{name.upper()}", "1")
    answers.append(refused({}))
    for said in answers:
        assert f"was taken away: {instead_of(name)}" in said
    for used in re.findall(r"--([a-z-]+)", instead_of(name)):
        assert used.replace("-", "_") in Settings.model_fields
    assert option not in shown_by("--help-all").split()


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("0", ("127.0.0.1", 0)),
        ("8002", ("127.0.0.1", 8002)),
        ("10.0.0.5:8002", ("10.0.0.5", 8002)),
        ("[::1]:8002", ("::1", 8002)),
    ],
)
def test_the_engine_port_may_have_a_host(text: str, address: tuple[str, int]) -> None:
    assert load_settings({"engine_port": text}).engine_address == address


@pytest.mark.parametrize("text", ["", "host", "10.0.0.5:", "70000", "-1", "1.5"])
def test_an_engine_port_that_is_none_is_refused(text: str) -> None:
    assert "--engine-port: must be PORT or HOST:PORT" in refused({"engine_port": text})


def test_settings_do_not_change_afterwards() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_settings({}).port = 1
