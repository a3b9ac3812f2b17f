"""Checks of a machine beside what the settings want of it: from facts to findings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from loraplex.adapters.admission.safetensors_header import largest_upload
from loraplex.adapters.spec import BaseSpec
from loraplex.app.cluster.choice import uses_ray
from loraplex.app.cluster.cost import OBJECT_STORE_BYTES, ray_bytes
from loraplex.app.doctor.findings import Finding, fail, ok, warn
from loraplex.app.doctor.machine import EngineDevice, Machine
from loraplex.app.ports.connections import RESERVED_FILES
from loraplex.app.setting_types import kv_disk
from loraplex.app.settings import Settings
from loraplex.app.storage.disk import GIB, Disk, data_room
from loraplex.engine.config import DEFAULT_SEQUENCES

_PROCESS_BYTES = GIB
_SLOW_SYNC_S = 0.1
_NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "fuse.sshfs", "9p", "ceph", "glusterfs", "lustre"}
)
_VOLATILE = frozenset({"tmpfs", "ramfs", "overlay"})
SKEW_WARN_S, SKEW_FAIL_S = 2.0, 60.0


def check_memory(settings: Settings, machine: Machine, device: EngineDevice) -> Finding:
    """The pools beside the memory that they are in: on a GPU the KV cache and the adapters are in the device's own."""
    in_host = {"adapter_cpu_memory": settings.adapter_cpu_memory, "kv_host_memory": settings.kv_host_memory}
    on_device = {"kv_cache_memory": settings.kv_cache_memory, "adapter_memory": settings.adapter_memory}
    if device.kind == "cpu":
        in_host |= on_device
    engines = engines_here(settings)
    wanted = sum(in_host.values()) * engines
    of_engines = f" of {engines} engines" if engines > 1 else ""
    found = f"{_gib(machine.memory_available)} of {_gib(machine.memory_total)} free"
    if wanted:
        found += f"; the settings want {_gib(wanted)} for pools{of_engines}, beside the model's weights"
    elif not any(on_device.values()):
        found += "; pools are chosen at the start from what is free then"
    remedy = f"lower {_options(in_host)}, or add memory"
    if wanted + _PROCESS_BYTES > machine.memory_total:
        return fail(found, remedy)
    if device.kind != "cpu" and (on_gpu := sum(on_device.values())):
        found += f"; the settings want {_gib(on_gpu)} of the GPU's {_gib(device.total)}"
        if on_gpu > device.total:
            return fail(found, f"lower {_options(on_device)}, or take a larger GPU")
    if wanted + _PROCESS_BYTES > machine.memory_available:
        return warn(
            found, "stop what else runs here, or lower the pools; a server that runs has its pools already"
        )
    return ok(found)


def _options(pools: Mapping[str, int]) -> str:
    """The options that are set."""
    return " or ".join(f"--{name.replace('_', '-')}" for name, size in pools.items() if size) or "the pools"


def engines_here(settings: Settings) -> int:
    """Engines that this machine may have at a time."""
    return 0 if settings.ray_cluster else max(settings.replicas, settings.max_replicas)


def check_engines(settings: Settings, machine: Machine) -> Finding:
    """Where several engines come from. Raises SettingsInvalid where the settings do not fit together."""
    by_ray, why = uses_ray(settings, lambda: machine.ray)
    if not by_ray:
        return ok(f"{settings.replicas} by this server: {why}")
    most = max(settings.replicas, settings.max_replicas)
    number = str(most) if most == settings.replicas else f"{settings.replicas} to {most}"
    found = f"{number} by {why}"
    if settings.ray_cluster:
        return ok(f"{found} at {settings.ray_cluster}")
    wanted = ray_bytes(most)
    found += f", which takes {_gib(wanted)} beside them"
    if machine.shared_memory < OBJECT_STORE_BYTES:
        return fail(
            f"{found}; /dev/shm has {machine.shared_memory >> 20} MiB free, and Ray wants "
            f"{OBJECT_STORE_BYTES >> 20} MiB of it",
            "make /dev/shm larger (--shm-size of a container), or use --ray-address none",
        )
    if machine.memory_available < wanted:
        return warn(found, "stop what else runs here, or use --ray-address none")
    return ok(found)


def check_data_dir(settings: Settings, disk: Disk, *, held: bool) -> Finding:
    """The journal and the database are in it."""
    wanted, remedy = data_room(settings)
    found = disk.room
    if held:
        found += ", in use by a running server"
    if disk.obstacle:
        return fail(disk.obstacle, "choose another with --data-dir, or give it to the server's user")
    if disk.free < wanted:
        return fail(found, remedy)
    if disk.file_system in _NETWORK:
        return warn(
            found, "use a local disk: locks and syncs of a network's are its server's, and SQLite needs both"
        )
    if disk.file_system in _VOLATILE:
        return warn(
            found, "mount a volume here: what is on this file system is lost with the machine or container"
        )
    if disk.sync_s is not None and disk.sync_s > _SLOW_SYNC_S:
        return warn(found, "use a faster disk: each change and each batch of usage waits for a sync")
    return ok(found)


def check_store(settings: Settings, store: tuple[Disk, ...], base: BaseSpec | None) -> Finding:
    """An upload is written into one folder, synced, and renamed into the other. `base`: None where it is not known."""
    staging, kept = store
    wanted = 2 * largest_upload(settings.max_adapter_upload, base)
    found = replace(kept, path=kept.path.parent).room
    obstacle = staging.obstacle or kept.obstacle
    if obstacle:
        return fail(obstacle, "give it to the server's user, or choose another with --artifact-url")
    if staging.device != kept.device:
        return fail(
            f"{staging.path} and {kept.path} are on two file systems",
            "mount one volume over both: an upload is renamed from the first to the second",
        )
    if kept.free < wanted:
        return warn(
            found,
            f"make room: {_gib(wanted)} are wanted for an upload (--max-adapter-upload) and its archive",
        )
    if kept.file_system in _VOLATILE:
        return warn(found, "mount a volume here: adapters are lost with the machine or container")
    return ok(found)


def check_prefix_disk(settings: Settings, disk: Disk, taken: int) -> Finding:
    """Each engine of this machine has a folder of its own there. `taken`: bytes that prefixes have there already."""
    wanted = max(1, settings.replicas) * kv_disk(settings.kv_disk).num_bytes
    if disk.obstacle:
        return fail(disk.obstacle, "choose another with --kv-disk, or give it to the server's user")
    if disk.free < wanted - taken:
        return warn(
            f"{disk.room}; {_gib(taken)} of prefixes are there",
            f"make room, or lower bytes= of --kv-disk: {_gib(wanted)} are wanted; without them prefixes are not kept",
        )
    if disk.file_system in _VOLATILE:
        return warn(disk.room, "mount a disk here: prefixes are lost with the machine or container")
    return ok(disk.room)


def check_open_files(settings: Settings, machine: Machine, device: EngineDevice) -> Finding:
    """The server raises its own limit as far as it may; each request has a connection."""
    sequences = settings.max_num_seqs or DEFAULT_SEQUENCES[device.kind]
    wanted = settings.max_waiting + sequences + RESERVED_FILES
    if machine.open_files is None:
        return ok("no limit")
    found = f"at most {machine.open_files}; {wanted} for --max-waiting, --max-num-seqs and the server itself"
    if machine.open_files < wanted:
        remedy = "raise it (LimitNOFILE of systemd, ulimit -Hn), or lower --max-waiting"
        return (fail if machine.open_files < 2 * RESERVED_FILES else warn)(found, remedy)
    return ok(found)


def check_huge_pages(machine: Machine) -> Finding:
    """The engine asks for them itself, for its pools in host memory (madvise)."""
    if machine.huge_pages == "never":
        return warn(
            "transparent huge pages are off", "write madvise to /sys/kernel/mm/transparent_hugepage/enabled"
        )
    return ok(f"transparent: {machine.huge_pages}" if machine.huge_pages else "this kernel has none")


def check_time_sync(machine: Machine) -> Finding:
    if machine.clock_synchronised is None:
        return ok("unknown: the kernel does not tell")
    if not machine.clock_synchronised:
        return warn(
            "the kernel says that this clock is not synchronised",
            "run chrony, systemd-timesyncd or the host's own: keys end and budgets begin by the clock",
        )
    return ok("the kernel says that this clock is synchronised")


def check_secrets(settings: Settings, machine: Machine) -> Finding:
    open_to_others = [file for file in machine.secrets if file.mode & 0o077]
    foreign = [file for file in machine.secrets if not file.is_own]
    given = [name for name in ("admin_token", "key_pepper") if getattr(settings, name)]
    if open_to_others:
        listed = ", ".join(f"{file.path} has mode {file.mode:04o}" for file in open_to_others)
        return fail(
            listed,
            f"chmod 600 {' '.join(str(file.path) for file in open_to_others)}; rotate what others may have read",
        )
    if foreign:
        listed = ", ".join(str(file.path) for file in foreign)
        return warn(f"{listed}: of another user", "run this as the server's user, or chown them to it")
    found = ", ".join(file.path.name for file in machine.secrets) or "none yet: made at the first start"
    if given:
        found += f"; {' and '.join(given)} by settings"
    return ok(found)


def check_skew(skew_s: float) -> Finding:
    """`skew_s`: the other clock less this machine's."""
    found = f"{abs(skew_s):.1f} s {'ahead of' if skew_s > 0 else 'behind'} this machine's"
    if abs(skew_s) < 0.05:
        found = "as this machine's"
    remedy = "synchronise the clocks of both machines"
    if abs(skew_s) > SKEW_FAIL_S:
        return fail(found, remedy)
    return warn(found, remedy) if abs(skew_s) > SKEW_WARN_S else ok(found)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
