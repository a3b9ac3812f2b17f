"""Adapters and versions: admitted once, numbered once, refused without a trace, deleted with the last who has them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.errors import AdapterRefused
from loraplex.control.catalog.adapters import Catalog
from loraplex.control.errors import AdapterNotFound, Conflict, InvalidValue, TenantNotFound, VersionNotFound
from loraplex.control.rules import InvalidCursor
from loraplex.control.types import VersionInfo
from support.adapters.drafts import draft_parts, make_adapter, write_delta_base
from support.adapters.towers import TOWER, draft_with, write_multimodal_base
from support.control.plane import ARCH, SERVED_NAME, ControlPlane, digests


def test_an_upload_becomes_the_first_version_and_is_released(plane: ControlPlane) -> None:
    info, is_new = plane.upload("acme", "pirate", rank=8, targets=("q_proj", "o_proj"))
    assert is_new
    assert (info.version, info.state, info.rank, info.pinned) == ("v1", "ready", 8, False)
    assert sorted(info.targets) == ["o_proj", "q_proj"]
    assert info.base_fingerprint == plane.base.fingerprint
    assert info.report["modules_matched"]
    folder = plane.store.path(info.digest)
    assert info.bytes == sum(path.stat().st_size for path in folder.iterdir())
    plane.store.verify(info.digest)
    assert plane.catalog.get_version("acme", "pirate", "v1") == info
    assert [t.version for t in plane.releases.get("acme", "pirate").targets] == ["v1"]
    plane.check_integrity()


def test_the_same_bytes_again_are_the_version_that_has_them(plane: ControlPlane) -> None:
    first = plane.add("acme", "pirate", seed=1)
    second = plane.add("acme", "pirate", seed=2)
    assert plane.upload("acme", "pirate", seed=1) == (first, False)
    assert second.version == "v2"
    assert [t.version for t in plane.releases.get("acme", "pirate").targets] == ["v1"]
    assert plane.upload("acme", "other", seed=1)[1]
    assert plane.upload("rival", "pirate", seed=1)[1]
    assert plane.stored() == {first.digest, second.digest}
    plane.check_integrity()


def upload_ordered(
    plane: ControlPlane, *, seed: int = 1, tenant: str = "acme", **lists: list[str]
) -> tuple[VersionInfo, bool]:
    """With these lists in the config, in this order."""
    with plane.store.begin_staging() as staging:
        make_adapter(staging.directory, ARCH, seed=seed, targets=("q_proj", "v_proj"))
        config = json.loads(staging.config_path.read_text())
        staging.config_path.write_text(json.dumps(config | lists, indent=2, sort_keys=True))
        return plane.catalog.admit(tenant, "pirate", staging)


def test_a_set_in_another_order_is_the_same_version(plane: ControlPlane) -> None:
    """PEFT holds target_modules and exclude_modules as sets, whose order differs by process."""
    targets, excluded = ["q_proj", "v_proj"], ["k_proj", "o_proj"]
    first, _ = upload_ordered(plane, target_modules=targets, exclude_modules=excluded)
    other, _ = upload_ordered(plane, seed=2, target_modules=targets, exclude_modules=excluded)
    for reverse in ({"target_modules": targets[::-1]}, {"exclude_modules": excluded[::-1]}):
        lists = {"target_modules": targets, "exclude_modules": excluded} | reverse
        assert upload_ordered(plane, **lists) == (first, False)
        assert upload_ordered(plane, seed=2, **lists) == (other, False)
    # Other tensors in another order are a version of their own, and so is another config.
    third, is_new = upload_ordered(plane, seed=3, target_modules=targets[::-1], exclude_modules=excluded)
    assert (third.version, is_new) == ("v3", True)
    longer, is_new = upload_ordered(plane, target_modules=[*targets, "x_proj"], exclude_modules=excluded)
    assert (longer.version, is_new, longer.digest != first.digest) == ("v4", True, True)
    # Another tenant's adapter is no business of this one's.
    theirs, _ = upload_ordered(plane, tenant="rival", target_modules=targets[::-1], exclude_modules=excluded)
    assert theirs.digest != first.digest
    assert plane.store.path(first.digest).joinpath("adapter_config.json").exists()
    plane.check_integrity()


def test_a_list_that_peft_keeps_in_its_order_is_another_version(plane: ControlPlane) -> None:
    first, _ = upload_ordered(plane, layers_to_transform=[0, 1])
    again, is_new = upload_ordered(plane, layers_to_transform=[1, 0])
    assert (is_new, again.digest == first.digest) == (True, False)


def test_a_deleted_versions_bytes_come_back_under_a_new_number(plane: ControlPlane) -> None:
    plane.add("acme", "pirate", seed=1)
    gone = plane.add("acme", "pirate", seed=2)
    plane.catalog.delete_version("acme", "pirate", "v2")
    again, is_new = plane.upload("acme", "pirate", seed=2)
    assert (again.version, is_new, again.digest) == ("v3", True, gone.digest)
    plane.catalog.delete_adapter("acme", "pirate")
    assert plane.add("acme", "pirate", seed=1).version == "v4"
    states = [info.state for info in plane.catalog.list_versions("acme", "pirate").items]
    assert states == ["deleted", "deleted", "deleted", "ready"]
    plane.check_integrity()


@pytest.mark.parametrize("name", ["a", "0", "a" * 63, "a.b_c-d", "v1", "sha256", "a..b"])
def test_names_that_pass(plane: ControlPlane, name: str) -> None:
    assert plane.add("acme", name).name == name


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../a", ".hidden", "-a", "_a", "A", "a" * 64, "a b", "a/b", "a@v1", "a:b", "é", "a\n"],
)
def test_names_that_do_not(plane: ControlPlane, name: str) -> None:
    with pytest.raises(InvalidValue):
        plane.catalog.check_upload("acme", name)
    with pytest.raises(InvalidValue):
        plane.upload("acme", name)
    assert plane.stored() == set()


@pytest.mark.parametrize("served_name", ["tiny", "Tiny"])
def test_the_bases_name_is_taken(plane: ControlPlane, served_name: str) -> None:
    """Clients that mean the base and write it in lower case must not reach a tenant's adapter."""
    catalog = Catalog(plane.database, plane.artifacts, plane.base, served_name=served_name, max_rank=64)
    with plane.store.begin_staging() as staging:
        make_adapter(staging.directory, ARCH)
        with pytest.raises(AdapterRefused) as caught:
            catalog.admit("acme", "tiny", staging)
    assert caught.value.code == "name_reserved"
    with pytest.raises(AdapterRefused):
        catalog.check_upload("acme", "tiny")


@pytest.mark.parametrize("refuse", [False, True])
def test_an_operator_says_what_becomes_of_tensors_for_towers(plane: ControlPlane, refuse: bool) -> None:
    base = load_base_spec(write_multimodal_base(plane.root / "llava"))
    options = {"served_name": SERVED_NAME, "max_rank": 64, "refuse_towers": refuse}
    catalog = Catalog(plane.database, plane.artifacts, base, **options)
    with plane.store.begin_staging() as staging:
        draft_with(TOWER).write(staging.directory)
        if not refuse:
            assert catalog.admit("acme", "sees", staging)[0].report["modules_ignored"] == 2
            return
        with pytest.raises(AdapterRefused) as caught:
            catalog.admit("acme", "sees", staging)
    assert caught.value.feature == "other_towers"


def test_parts_of_a_linear_are_joined_before_they_are_stored(plane: ControlPlane) -> None:
    base = load_base_spec(write_delta_base(plane.root / "delta"))
    catalog = Catalog(plane.database, plane.artifacts, base, served_name=SERVED_NAME, max_rank=64)
    with plane.store.begin_staging() as staging:
        draft_parts(rank=4).write(staging.directory)
        made = catalog.admit("acme", "split", staging)[0]
    assert made.report["checks"][0]["name"] == "split_linears"
    assert made.targets == ("in_proj_qkv",)
    assert made.rank == 12
    plane.store.verify(made.digest)


def test_a_refused_upload_leaves_nothing_behind(plane: ControlPlane) -> None:
    with plane.store.begin_staging() as staging, pytest.raises(AdapterRefused) as caught:
        files = make_adapter(staging.directory, ARCH)
        config = json.loads(files.config.read_text()) | {"lora_bias": True}
        files.config.write_text(json.dumps(config))
        plane.catalog.admit("acme", "pirate", staging)
    assert caught.value.code == "unsupported_feature"
    assert caught.value.report
    with pytest.raises(AdapterNotFound):
        plane.catalog.list_versions("acme", "pirate")
    assert plane.stored() == set()
    plane.check_integrity()


def test_no_tenant_no_upload(plane: ControlPlane) -> None:
    with pytest.raises(TenantNotFound):
        plane.upload("nobody", "pirate")
    plane.check_integrity()


def test_the_number_of_adapters_is_limited_and_of_versions_is_not(plane: ControlPlane) -> None:
    plane.tenants.update("acme", {"limits": {"max_adapters": 2}})
    plane.add("acme", "one", seed=1)
    plane.add("acme", "two", seed=2)
    plane.add("acme", "two", seed=3)
    with pytest.raises(AdapterRefused) as caught:
        plane.upload("acme", "three", seed=4)
    assert caught.value.code == "quota_exceeded"
    with pytest.raises(AdapterRefused):
        plane.catalog.check_upload("acme", "three")
    plane.catalog.check_upload("acme", "two")
    plane.upload("rival", "three", seed=4)
    plane.catalog.delete_adapter("acme", "one")
    plane.add("acme", "three", seed=4)
    plane.check_integrity()


def test_the_bytes_of_a_tenant_are_limited_to_the_last(plane: ControlPlane) -> None:
    size = plane.add("rival", "probe", seed=9).bytes
    plane.tenants.update("acme", {"limits": {"max_adapter_bytes": 2 * size}})
    plane.add("acme", "one", seed=1)
    plane.add("acme", "one", seed=2)
    with pytest.raises(AdapterRefused) as caught:
        plane.upload("acme", "one", seed=3)
    assert caught.value.code == "quota_exceeded"
    assert plane.upload("acme", "one", seed=2)[1] is False
    plane.catalog.delete_version("acme", "one", "v2")
    plane.add("acme", "one", seed=3)
    plane.tenants.update("acme", {"limits": {"max_adapter_bytes": 1}})
    assert plane.catalog.get_version("acme", "one", "v1").state == "ready"  # a lower limit takes nothing away
    plane.check_integrity()


def test_shared_bytes_stay_until_the_last_one_goes(plane: ControlPlane) -> None:
    digest = plane.add("acme", "one", seed=1).digest
    plane.add("acme", "two", seed=1)
    plane.add("rival", "one", seed=1)
    assert digests(plane.catalog.delete_adapter("acme", "one")) == set()
    assert digests(plane.catalog.delete_version("acme", "two", "v1")) == set()
    plane.store.verify(digest)
    assert digests(plane.catalog.delete_adapter("rival", "one")) == {digest}
    assert plane.stored() == set()
    plane.check_integrity()


def test_a_released_version_goes_only_as_the_last_one(plane: ControlPlane) -> None:
    plane.add("acme", "pirate", seed=1)
    plane.add("acme", "pirate", seed=2)
    with pytest.raises(Conflict):
        plane.catalog.delete_version("acme", "pirate", "v1")
    plane.releases.promote("acme", "pirate", "v2")
    plane.catalog.delete_version("acme", "pirate", "v1")
    plane.catalog.delete_version("acme", "pirate", "v2")
    with pytest.raises(AdapterNotFound):
        plane.catalog.get_adapter("acme", "pirate")
    plane.check_integrity()


@pytest.mark.parametrize(
    "version", ["v01", "v1 ", "V1", "1", "v", "v0", "v-1", "v1.0", "v²", "v" + "9" * 40, "", "v2"]
)
def test_each_version_has_one_name(plane: ControlPlane, version: str) -> None:
    plane.add("acme", "pirate", seed=1)
    calls: list[Any] = [plane.catalog.get_version, plane.catalog.delete_version]
    for call in calls:
        with pytest.raises(VersionNotFound):
            call("acme", "pirate", version)
    with pytest.raises(VersionNotFound):
        plane.catalog.set_pin("acme", "pirate", version, True)
    assert plane.catalog.get_version("acme", "pirate", "v1").state == "ready"


def test_a_pin_stays_over_a_restart_and_goes_with_its_version(plane: ControlPlane) -> None:
    plane.add("acme", "pirate", seed=1)
    plane.add("acme", "pirate", seed=2)
    assert plane.catalog.set_pin("acme", "pirate", "v2", True).pinned
    again = ControlPlane(plane.root)
    again.start()
    assert [(info.name, info.version) for info in again.catalog.pinned()] == [("pirate", "v2")]
    assert not again.catalog.set_pin("acme", "pirate", "v2", False).pinned
    again.catalog.set_pin("acme", "pirate", "v2", True)
    again.catalog.delete_version("acme", "pirate", "v2")
    assert again.catalog.pinned() == []
    with pytest.raises(VersionNotFound):
        again.catalog.set_pin("acme", "pirate", "v2", True)
    again.close()


def test_names_and_versions_are_listed_by_pages_and_by_tenant(plane: ControlPlane) -> None:
    for number in range(5):
        plane.add("acme", f"a{number}", seed=1)
    for seed in range(2, 13):
        plane.add("acme", "a0", seed=seed)
    plane.add("rival", "a1", seed=1)
    plane.catalog.delete_adapter("acme", "a3")
    first = plane.catalog.list_adapters("acme", limit=3)
    rest = plane.catalog.list_adapters("acme", limit=3, cursor=first.next_cursor)
    assert [info.name for info in first.items + rest.items] == ["a0", "a1", "a2", "a4"]
    assert (first.items[0].latest, first.items[0].num_versions) == (12, 12)
    assert rest.next_cursor is None

    seen: list[str] = []
    cursor = None
    while True:
        page = plane.catalog.list_versions("acme", "a0", limit=5, cursor=cursor)
        seen += [info.version for info in page.items]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert seen == [f"v{number}" for number in range(1, 13)]
    with pytest.raises(InvalidCursor):
        plane.catalog.list_versions("acme", "a0", cursor=first.next_cursor)


def test_other_tenants_adapters_are_not_there(plane: ControlPlane) -> None:
    plane.add("acme", "pirate")
    calls: list[Any] = [
        plane.catalog.get_adapter,
        plane.catalog.list_versions,
        plane.catalog.delete_adapter,
    ]
    for call in calls:
        with pytest.raises(AdapterNotFound):
            call("rival", "pirate")
        with pytest.raises(TenantNotFound):
            call("nobody", "pirate")
    with pytest.raises(AdapterNotFound):
        plane.catalog.delete_version("rival", "pirate", "v1")


def test_another_base_makes_versions_incompatible_until_theirs_is_back(plane: ControlPlane) -> None:
    info = plane.add("acme", "pirate", seed=1)
    other = ControlPlane(plane.root, base_seed=1)
    other.start()
    assert other.catalog.get_version("acme", "pirate", "v1").state == "incompatible"
    assert other.stored() == {info.digest}
    again, is_new = other.upload("acme", "pirate", seed=1)  # the same bytes, checked against this base
    assert (again.version, again.state, is_new) == ("v2", "ready", True)
    other.releases.promote("acme", "pirate")
    with pytest.raises(InvalidValue):
        other.releases.promote("acme", "pirate", "v1")
    other.close()

    back = ControlPlane(plane.root)
    back.start()
    states = [info.state for info in back.catalog.list_versions("acme", "pirate").items]
    assert states == ["ready", "incompatible"]
    assert digests(back.catalog.delete_adapter("acme", "pirate")) == {info.digest}
    back.check_integrity()
    back.close()
