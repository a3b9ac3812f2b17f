"""`loraplex doctor` on five made machines: the whole of what it says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from loraplex.adapters.admission.safetensors_header import largest_upload
from loraplex.adapters.spec import BaseSpec, ExpertShape
from loraplex.app.doctor.checks import checks_of, report
from loraplex.app.doctor.machine import Disk, Machine, Port, SecretFile, read_machine
from loraplex.app.output import Output
from loraplex.app.settings import Settings
from loraplex.migrations.run import upgrade
from support.models.expert_adapters import plain_base
from support.servers.postgres import postgres_server
from support.servers.redis_server import RedisServer, redis_server

GIB = 1 << 30
DATA = Path("/srv/data")


class Torch(dict[str, str]):
    """What torch answers; OSError where an answer is missing."""

    def __missing__(self, name: str) -> str:
        raise OSError(f"no {name}: torch cannot be imported")


CPU_TORCH = Torch(
    torch="2.13.0, transformers 5.0, device cpu (AVX512)",
    device="cpu",
    kernels="numba for sapphirerapids, 8 threads",
    speculation="on, by what steps cost when the server starts",
)
GPU_TORCH = Torch(
    torch="2.13.0, transformers 5.0, device NVIDIA L40S (AVX2)",
    device=f"cuda {45 * GIB}",
    kernels="triton",
    speculation="off: steps are planned before the tokens of the one before are known (lookahead 1)",
)


def expected(name: str) -> str:
    """The whole output, as it was reviewed."""
    return (Path(__file__).parent / "machines" / f"{name}.txt").read_text()


def disk(name: str, **facts: object) -> Disk:
    path = DATA / name
    return replace(Disk(path, path, 200 * GIB, "ext4", 1, sync_s=0.002), **facts)  # type: ignore[arg-type]


GOOD = Machine(
    python="3.12.1 on x86_64, 8 cores",
    memory_total=64 * GIB,
    memory_available=60 * GIB,
    open_files=524288,
    huge_pages="madvise",
    clock_synchronised=True,
    data=disk(""),
    store=(disk("artifacts/staging"), disk("artifacts/sha256")),
    secrets=(SecretFile(DATA / "key-pepper", 0o600, True), SecretFile(DATA / "admin-token", 0o600, True)),
    data_port=Port("0.0.0.0:8000"),
    admin_port=Port("127.0.0.1:8001"),
)


def said(
    capsys: pytest.CaptureFixture[str],
    machine: Machine,
    torch: Mapping[str, str],
    tmp_path: Path,
    base: BaseSpec | None = None,
    **settings: object,
) -> tuple[int, str]:
    """The exit code and the output, with what differs from run to run replaced."""
    given = Settings.model_validate({"data_dir": tmp_path / "data", **settings})
    code = report(checks_of(given, machine, torch, lambda: base), Output(False))
    text = capsys.readouterr().out
    text = re.sub(r"(SQLite|PostgreSQL|Redis) \d[\d.]*", r"\1 VERSION", text)
    text = re.sub(r"127\.0\.0\.1:\d{5}", "HOST", text).replace(str(tmp_path), "TMP")
    text = re.sub(r"test_\d+", "NAME", text)
    assert not (tmp_path / "data").exists(), "doctor made the data directory"
    return code, text


def test_a_good_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert said(capsys, GOOD, CPU_TORCH, tmp_path) == (0, expected("good"))


def test_a_gpu_server_that_runs_on_postgres_and_redis(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    url = postgres_server().create_database()
    upgrade(url)
    machine = replace(
        GOOD,
        is_held=True,
        data_port=Port("0.0.0.0:8000", "Address already in use", is_in_use=True),
        admin_port=Port("127.0.0.1:8001", "Address already in use", is_in_use=True),
    )
    options = {
        "database_url": url,
        "redis_url": redis_server().url,
        "device": "cuda",
        "adapter_memory": 30 * GIB,
    }
    assert said(capsys, machine, GPU_TORCH, tmp_path, **options) == (0, expected("server"))


def test_a_disk_for_prefixes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Each engine takes its bytes there; those that are there already count as room."""

    def line(taken: int = 0, replicas: int = 1, **facts: object) -> str:
        machine = replace(GOOD, prefixes=disk("prefixes", **facts), prefix_bytes=taken)
        options = {"kv_disk": "/srv/data/prefixes,bytes=80GiB", "kv_host_memory": GIB, "replicas": replicas}
        code, text = said(capsys, machine, CPU_TORCH, tmp_path, **options)
        assert code == (1 if "obstacle" in facts else 0)
        (found,) = (line for line in text.split("\n") if "prefix disk: " in line)
        return found

    assert line() == "ok    prefix disk: /srv/data/prefixes, 200.0 GiB free on ext4, a sync takes 2 ms"
    assert line(replicas=2).startswith("ok    ")
    assert line(replicas=3).startswith("warn  prefix disk: /srv/data/prefixes, 200.0 GiB free on ext4")
    assert line(free=30 * GIB, taken=60 * GIB).startswith("ok    ")
    assert "60.0 GiB of prefixes are there" in line(free=10 * GIB, taken=60 * GIB)
    assert line(file_system="tmpfs").startswith("warn  ")
    assert "/srv/data/prefixes cannot be written" in line(obstacle="/srv/data/prefixes cannot be written")


def test_what_prefixes_take_is_counted_and_their_key_is_a_secret(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    key.chmod(0o644)
    folder = tmp_path / "prefixes"
    (folder / "0").mkdir(parents=True)
    (folder / "0" / "block").write_bytes(bytes(1 << 20))
    machine = read_machine(Settings(data_dir=tmp_path / "data", kv_disk=f"{folder},key-file={key}"))
    assert machine.prefixes is not None
    assert machine.prefixes.path == folder
    assert 1 << 20 <= machine.prefix_bytes < 1 << 21
    assert (key, 0o644) in [(secret.path, secret.mode) for secret in machine.secrets]
    assert read_machine(Settings(data_dir=tmp_path / "data")).prefixes is None


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_pools_count_where_the_device_that_is_found_has_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, device: str
) -> None:
    """A CPU's are in host memory, whether the setting names the CPU or finds it."""
    found = partial(said, capsys, GOOD, CPU_TORCH, tmp_path, device=device)
    code, text = found(kv_cache_memory=900 * GIB)
    assert code == 1
    assert "wrong memory: 60.0 GiB of 64.0 GiB free; the settings want 900.0 GiB for pools" in text
    assert "lower --kv-cache-memory, or add memory" in text
    assert "warn  memory: " in found(kv_cache_memory=40 * GIB, adapter_memory=22 * GIB)[1]
    assert "ok    memory: " in found(kv_cache_memory=40 * GIB)[1]


def test_a_gpus_pools_are_compared_with_the_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = partial(said, capsys, GOOD, GPU_TORCH, tmp_path)
    code, text = found(kv_cache_memory=900 * GIB)
    assert code == 1
    assert "the settings want 900.0 GiB of the GPU's 45.0 GiB" in text
    assert "lower --kv-cache-memory, or take a larger GPU" in text
    assert "ok    memory: " in found(kv_cache_memory=40 * GIB)[1]


def test_room_for_uploads_follows_from_the_base(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """As the server takes them: adapters on the 128 experts of 48 layers are large."""
    experts = {
        layer: ExpertShape(layer, f"model.layers.{layer}.mlp.experts", 128, 2048, 768) for layer in range(48)
    }
    mixture = plain_base(experts)
    largest = largest_upload("auto", mixture)
    assert largest > 3 * GIB
    few = replace(
        GOOD, store=(disk("artifacts/staging", free=4 * GIB), disk("artifacts/sha256", free=4 * GIB))
    )
    wanted = partial(said, capsys, few, CPU_TORCH, tmp_path)
    assert f"make room: {2 * largest / GIB:.1f} GiB are wanted for an upload" in wanted(mixture)[1]
    assert "ok    artifact store: " in wanted(mixture, max_adapter_upload=GIB)[1]
    assert "ok    artifact store: " in wanted(None)[1]


def test_a_careless_container(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    machine = replace(
        GOOD,
        memory_total=4 * GIB,
        memory_available=3 * GIB,
        open_files=1024,
        huge_pages="never",
        clock_synchronised=False,
        data=disk("", file_system="overlay", sync_s=None),
        store=tuple(
            disk(name, file_system="overlay", sync_s=None)
            for name in ("artifacts/staging", "artifacts/sha256")
        ),
        secrets=(),
    )
    options = {"device": "cpu", "kv_cache_memory": 4 * GIB}
    assert said(capsys, machine, CPU_TORCH, tmp_path, **options) == (1, expected("container"))


def test_a_machine_before_an_upgrade(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """An older schema, a Redis that evicts, a data directory on NFS, a pepper that others can read, a slow disk."""
    url = postgres_server().create_database()
    upgrade(url, "0005")
    machine = replace(
        GOOD,
        memory_available=2 * GIB,
        data=disk("", file_system="nfs4", sync_s=0.03),
        store=(disk("artifacts/staging", free=GIB), disk("artifacts/sha256", free=GIB)),
        secrets=(
            SecretFile(DATA / "key-pepper", 0o644, True),
            SecretFile(DATA / "admin-token", 0o600, False),
        ),
        clock_synchronised=None,
    )
    redis = RedisServer(**{"maxmemory-policy": "allkeys-lru"})
    try:
        options = {"database_url": url, "redis_url": redis.url, "device": "cpu", "adapter_memory": 2 * GIB}
        assert said(capsys, machine, CPU_TORCH, tmp_path, **options) == (1, expected("upgrade"))
    finally:
        redis.close()


def test_a_machine_where_all_is_wrong(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    machine = replace(
        GOOD,
        memory_total=GIB,
        memory_available=GIB,
        open_files=64,
        data=disk("", obstacle="/srv cannot be written by this user", sync_s=None),
        store=(disk("artifacts/staging"), disk("artifacts/sha256", device=2)),
        data_port=Port("0.0.0.0:8000", "Address already in use", is_in_use=True),
        admin_port=Port("10.1.2.3:8001", "Cannot assign requested address"),
    )
    options = {
        "database_url": "postgresql://loraplex:hunter2@127.0.0.1:1/loraplex",
        "redis_url": "redis://:hunter2@127.0.0.1:1/0",
        "adapter_cpu_memory": 2 * GIB,
    }
    code, text = said(capsys, machine, Torch(), tmp_path, **options)
    assert (code, text) == (1, expected("wrong"))
    assert "hunter2" not in text


RAY = replace(GOOD, ray="2.60.1", shared_memory=8 * GIB)
ENGINES = [
    (GOOD, {"replicas": 2}, "ok    engines: 2 by this server: Ray is not installed: pip install"),
    (RAY, {"replicas": 2}, "ok    engines: 2 by Ray 2.60.1, which takes 0.8 GiB beside them"),
    (RAY, {"replicas": 2, "max_replicas": 4}, "ok    engines: 2 to 4 by Ray 2.60.1, which takes 1.0 GiB"),
    (GOOD, {"replicas": 2, "max_replicas": 4}, "wrong engines: Ray is not installed: pip install"),
    (
        replace(RAY, ray="2.61.0"),
        {"ray_address": "local"},
        "wrong engines: Ray 2.61.0 is installed, and 2.60",
    ),
    (replace(RAY, shared_memory=64 << 20), {"replicas": 2}, "/dev/shm has 64 MiB free, and Ray wants 80 MiB"),
    (replace(RAY, memory_available=GIB // 2), {"replicas": 2}, "warn  engines: 2 by Ray"),
    (
        replace(RAY, shared_memory=0),
        {"ray_address": "10.0.0.1:6379", "engine_port": "10.0.0.2:8002"},
        "ok    engines: 1 by Ray 2.60.1 at 10.0.0.1:6379",
    ),
    (GOOD, {"replicas": 0, "engine_port": 8002}, "ok    engines: 0 by this server: --replicas 0"),
]


@pytest.mark.parametrize(("machine", "settings", "expected"), ENGINES)
def test_where_several_engines_come_from(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    machine: Machine,
    settings: dict[str, object],
    expected: str,
) -> None:
    code, text = said(capsys, machine, CPU_TORCH, tmp_path, **settings)
    assert expected in text
    assert code == ("wrong" in text)
    assert " engines: " not in said(capsys, machine, CPU_TORCH, tmp_path)[1]


def test_pools_count_for_each_engine_of_this_machine(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    _, text = said(capsys, RAY, CPU_TORCH, tmp_path, replicas=2, max_replicas=4, kv_cache_memory=10 * GIB)
    assert "the settings want 40.0 GiB for pools of 4 engines, beside" in text


def test_the_engine_port_is_looked_at_where_one_is_wanted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    taken = replace(GOOD, engine_port=Port("127.0.0.1:8002", "Address already in use", is_in_use=True))
    code, text = said(capsys, taken, CPU_TORCH, tmp_path)
    assert code == 1
    assert "wrong engine port: 127.0.0.1:8002 cannot be used: Address already in use" in text
    assert "engine port" not in said(capsys, GOOD, CPU_TORCH, tmp_path)[1]


def test_a_token_that_others_may_read_is_found_where_it_is(tmp_path: Path) -> None:
    token = tmp_path / "engine-token"
    token.write_text("x")
    token.chmod(0o644)
    machine = read_machine(
        Settings(data_dir=tmp_path / "data", engine_token_file=str(token), engine_port="0")
    )
    assert [(file.path, file.mode) for file in machine.secrets] == [(token, 0o644)]
    assert machine.shared_memory > 0
