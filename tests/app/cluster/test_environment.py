"""The environment of Ray's processes, and their end."""

from __future__ import annotations

import stat
import subprocess
from pathlib import Path

from loraplex.app.cluster.environment import (
    make_ray_folder,
    processes_of,
    ray_environment,
    remove_ray_folder,
)

SECRETS = {"LORAPLEX_ADMIN_TOKEN": "secret", "LORAPLEX_DATABASE_URL": "postgresql://u:p@h/d"}


def test_a_ray_of_our_own_is_on_loopback_with_a_token_and_silent(tmp_path: Path) -> None:
    environment = ray_environment({"PATH": "/bin"} | SECRETS, tmp_path, token="t")
    assert environment["PATH"] == "/bin"
    assert environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
    assert (environment["RAY_AUTH_MODE"], environment["RAY_AUTH_TOKEN"]) == ("token", "t")
    assert environment["RAY_USAGE_STATS_ENABLED"] == "0"
    assert environment["RAY_TMPDIR"] == str(tmp_path)
    assert environment["RAY_gcs_rpc_server_reconnect_timeout_s"] == "600"
    for name in ("gcs_server_port_wait_time_s", "raylet_start_wait_time_s"):
        assert float(environment[f"RAY_{name}"]) > 60  # Ray's own 30 s are too few on a busy machine
    assert float(environment["RAY_agent_register_timeout_ms"]) > 60_000
    assert environment["RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S"] == "1"


def test_secrets_of_the_server_stay_with_it(tmp_path: Path) -> None:
    given = SECRETS | {"LORAPLEX_MODEL_CACHE": "/cache", "AWS_ACCESS_KEY_ID": "id"}
    environment = ray_environment(given, tmp_path, token="t")
    assert [name for name in environment if name.startswith("LORAPLEX_")] == ["LORAPLEX_MODEL_CACHE"]
    assert environment["AWS_ACCESS_KEY_ID"] == "id"  # engines read the bucket


def test_a_running_cluster_keeps_its_own_network_and_token(tmp_path: Path) -> None:
    environment = ray_environment({"RAY_AUTH_TOKEN": "theirs"}, tmp_path, token=None)
    assert environment["RAY_AUTH_TOKEN"] == "theirs"
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in environment
    assert "RAY_memory_monitor_refresh_ms" not in environment


def test_the_folder_goes_with_all_that_runs_below_it() -> None:
    folder = make_ray_folder()
    try:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert len(str(folder)) < 30
        mine = ["sleep", "600"]
        left = subprocess.Popen(mine, env=ray_environment({"PATH": "/bin:/usr/bin"}, folder, token="t"))
        stranger = subprocess.Popen(mine)
        with open(folder / "log", "wb") as log:  # as an agent that has lost its environment by a new name
            renamed = subprocess.Popen(mine, stdout=log)
        try:
            assert set(processes_of(folder)) == {left.pid, renamed.pid}
            remove_ray_folder(folder)
            assert left.wait(10) == renamed.wait(10) == -9
            assert not folder.exists()
            assert stranger.poll() is None
        finally:
            stranger.kill()
            stranger.wait()
            for process in (left, renamed):
                process.kill()
                process.wait()
    finally:
        remove_ray_folder(folder)
