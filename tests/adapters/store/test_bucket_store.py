"""The bucket behind its cache, over a network that delays, hangs and resets, with processes that die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import obstore
import pytest

from loraplex.adapters.errors import ArtifactCorrupt, ArtifactMissing, ArtifactUnreadable, StoreFailed
from loraplex.adapters.store.artifact_store import ArtifactStore
from loraplex.adapters.store.bucket_client import BucketClient
from loraplex.adapters.store.bucket_store import IN_USE_S, BucketStore
from loraplex.adapters.store.fault_points import BUCKET_POINTS, FaultPoint
from loraplex.adapters.store.files import CONFIG_NAME, TENSORS_NAME, digest_upload
from support.control.plane import FakeClock
from support.faults.tcp_proxy import TcpProxy
from support.servers.live_server import importable_tests
from support.servers.s3_server import BUCKET, S3Server
from support.waiting import eventually

LARGE = os.urandom(17 << 20)  # three parts
SMALL = os.urandom(64 << 10)


class Network:
    """Stores that reach one prefix of the bucket through `proxy`, each with a cache of its own."""

    def __init__(self, s3: S3Server, proxy: TcpProxy, root: Path) -> None:
        self.s3, self.proxy, self.root = s3, proxy, root
        self.clock = FakeClock()
        self._num = 0

    def store(self, *, deadline_s: float = 10.0, cache_bytes: int = 1 << 30, cache: str = "") -> BucketStore:
        self._num += 1
        return BucketStore(
            BucketClient(BUCKET, self.root.name, deadline_s=deadline_s, request_s=2.0),
            self.root / (cache or f"cache-{self._num}"),
            cache_bytes=cache_bytes,
            orphan_age=timedelta(seconds=-5),
            clock=self.clock,
        )

    def objects(self) -> obstore.store.S3Store:
        return self.s3.store(self.root.name)

    def key(self, digest: str, name: str = TENSORS_NAME) -> str:
        return f"sha256/{digest[:2]}/{digest}/{name}"


@pytest.fixture
def network(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    with TcpProxy(s3.port) as proxy:
        for name, value in s3.variables(proxy.port).items():
            monkeypatch.setenv(name, value)
        yield Network(s3, proxy, tmp_path)


def add(store: BucketStore, content: bytes = SMALL) -> str:
    staging = store.begin_staging()
    staging.config_path.write_bytes(b"{}")
    staging.tensors_path.write_bytes(content)
    digest = digest_upload(staging.config_path, staging.tensors_path)
    store.commit(staging, digest)
    return digest


def content(store: BucketStore, digest: str) -> bytes:
    return (store.path(digest) / TENSORS_NAME).read_bytes()


def test_several_parts_both_ways(network: Network) -> None:
    digest = add(network.store(), LARGE)
    assert obstore.head(network.objects(), network.key(digest))["e_tag"].strip('"').endswith("-3")
    assert content(network.store(), digest) == LARGE


def test_connections_that_are_reset_are_asked_again(network: Network) -> None:
    network.proxy.resets, network.proxy.reset_after = 3, 0
    digest = add(network.store(), LARGE)
    network.proxy.resets, network.proxy.reset_after = 4, 1 << 20
    assert content(network.store(), digest) == LARGE
    assert network.proxy.num_reset >= 4


def test_a_slow_network_is_waited_for(network: Network) -> None:
    network.proxy.delay_s = 0.01
    digest = add(network.store())
    assert content(network.store(), digest) == SMALL


def test_while_the_bucket_is_away_what_is_cached_is_read(network: Network) -> None:
    cached, cold = add(network.store()), add(network.store(), b"cold")
    first = network.store(deadline_s=0.5, cache="cache-1")
    network.proxy.hang()
    assert content(first, cached) == SMALL
    began = time.monotonic()
    with pytest.raises(ArtifactUnreadable):
        first.path(cold)
    assert time.monotonic() - began < 30
    # The next ones are told at once, until it is time to ask again.
    began = time.monotonic()
    for _ in range(20):
        with pytest.raises(ArtifactUnreadable):
            first.path(cold)
    assert time.monotonic() - began < 5  # 10 s if each asked again
    with pytest.raises(StoreFailed):
        add(first, b"new")
    assert list((network.root / "cache-1" / "staging").iterdir()) == []
    network.proxy.carry()

    def is_back() -> bool:
        network.clock.advance(60)
        try:
            return content(first, cold) == b"cold"
        except ArtifactUnreadable:  # half a second was not enough
            return False

    eventually(is_back)


def test_a_flipped_bit_in_the_bucket_is_never_served(network: Network) -> None:
    store = network.store()
    digest = add(store)
    obstore.put(network.objects(), network.key(digest), SMALL[:-1] + bytes([SMALL[-1] ^ 1]))
    other = network.store()
    with pytest.raises(ArtifactCorrupt):
        other.path(digest)
    assert not other.drop_damaged_copy(digest)
    assert list((network.root / "cache-2" / "sha256").rglob("*.safetensors")) == []
    assert list((network.root / "cache-2" / "staging").iterdir()) == []


@pytest.mark.parametrize("name", [CONFIG_NAME, TENSORS_NAME])
def test_a_flipped_bit_in_the_copy_is_fetched_again(network: Network, name: str) -> None:
    store = network.store()
    digest = add(store)
    path = store.path(digest) / name
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ArtifactCorrupt):
        store.verify(digest)
    assert store.drop_damaged_copy(digest) is True
    assert content(store, digest) == SMALL
    store.verify(digest)
    # And by what looks for damage: the bucket's bytes are whole.
    path.write_bytes(b"x")
    assert store.examine(digest).damage is None
    assert content(store, digest) == SMALL


def test_an_object_that_is_lost_is_missing_or_damaged(network: Network) -> None:
    store = network.store()
    digest = add(store)
    obstore.delete(network.objects(), network.key(digest))
    with pytest.raises(ArtifactCorrupt):
        network.store().path(digest)
    obstore.delete(network.objects(), network.key(digest, CONFIG_NAME))
    with pytest.raises(ArtifactMissing):
        network.store().path(digest)


def test_the_cache_is_bounded_and_keeps_what_was_used_last(network: Network) -> None:
    store = network.store(cache_bytes=3 * len(SMALL))
    digests = [add(store, os.urandom(len(SMALL) - 100)) for _ in range(5)]
    folders = {digest: network.root / "cache-1" / "sha256" / digest[:2] / digest for digest in digests}
    assert all(folder.exists() for folder in folders.values())  # all are in use
    for age, digest in enumerate(digests):
        used = time.time() - 2 * IN_USE_S + age
        os.utime(folders[digest], (used, used))
    store.path(digests[0])
    last = add(store, b"one more")
    kept = {digest for digest, folder in folders.items() if folder.exists()}
    assert kept == {digests[0], digests[4]} | ({digests[3]} & kept)
    assert digests[1] not in kept
    assert content(store, last) == b"one more"
    assert len(content(store, digests[1])) == len(SMALL) - 100  # from the bucket


def test_two_uploads_of_the_same_bytes_at_a_time(network: Network) -> None:
    with ThreadPoolExecutor(4) as threads:
        digests = set(threads.map(lambda _: add(network.store()), range(4)))
    [digest] = digests
    assert content(network.store(), digest) == SMALL


CHILD = """
import os, signal, sys
from datetime import timedelta
from pathlib import Path
from loraplex.adapters.store.bucket_client import BucketClient
from loraplex.adapters.store.bucket_store import BucketStore
from loraplex.adapters.store.fault_points import FaultPoint
from loraplex.adapters.store.files import digest_upload

root, bucket, prefix, act, number, seed = sys.argv[1:7]
count = 0
def fault(step, *paths):
    global count
    count += 1
    if count == int(number):
        os.kill(os.getpid(), signal.SIGKILL)
store = BucketStore(BucketClient(bucket, prefix), Path(root), cache_bytes=1 << 30, fault=fault)
if act == "delete":
    store.delete(seed)
elif act == "fetch":
    store.path(seed)
else:
    with store.begin_staging() as staging:
        staging.config_path.write_bytes(b"{}")
        staging.tensors_path.write_bytes(seed.encode() * 1000)
        store.commit(staging, digest_upload(staging.config_path, staging.tensors_path))
"""


@pytest.mark.slow
@pytest.mark.parametrize("act", ["commit", "delete", "fetch"])
def test_a_process_that_is_killed_at_any_step_leaves_whole_artifacts(network: Network, act: str) -> None:
    """What was there before stays, what was to come is there whole or not at all, and a sweep leaves nothing else."""
    witness = network.store()
    kept = add(witness)
    expected = digest_upload_of(network.root, b"step" * 1000)
    died = 0
    for number in range(1, 60):
        target = add(witness, b"step" * 1000) if act != "commit" else "step"
        if act == "commit":
            witness.delete(expected)
        arguments = [str(network.root / "child"), BUCKET, network.root.name, act, str(number), target]
        environment = {**os.environ, "PYTHONPATH": importable_tests()}
        run = subprocess.run(
            [sys.executable, "-c", CHILD, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode in (0, -signal.SIGKILL), run.stderr
        after = network.store(cache="child")
        assert content(network.store(), kept) == SMALL
        try:
            assert content(network.store(), expected) == b"step" * 1000
        except ArtifactMissing:
            assert act != "fetch"
        after.sweep({kept})
        assert list(after.digests()) == [kept]
        assert list((network.root / "child" / "staging").iterdir()) == []
        keys = [meta["path"] for page in obstore.list(network.objects()) for meta in page]
        assert {key.split("/")[-2] for key in keys} == {kept}
        if run.returncode == 0:
            break
        died += 1
    assert died >= {"commit": 5, "delete": 5, "fetch": 5}[act]


def digest_upload_of(root: Path, tensors: bytes) -> str:
    with ArtifactStore(root / "scratch").begin_staging() as staging:
        staging.config_path.write_bytes(b"{}")
        staging.tensors_path.write_bytes(tensors)
        return digest_upload(staging.config_path, staging.tensors_path)


def test_the_fault_points_of_the_bucket_are_announced(network: Network) -> None:
    seen: list[FaultPoint] = []
    store = network.store()
    store._cache.fault = lambda step, *paths: seen.append(step)
    digest = add(store)
    store.delete(digest)
    assert seen.count(FaultPoint.BUCKET_PUT) == seen.count(FaultPoint.BUCKET_DELETE) == 2
    assert set(seen) >= BUCKET_POINTS
