"""Wheels of other servers beside the kernels here, by wheels made for the purpose."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from bench.gpu.case import Bench, Skipped
from bench.gpu.lora import LoraCase
from bench.gpu.lora_peers import __main__ as command
from bench.gpu.lora_peers.cases import FOLDER, OURS, run_case
from bench.gpu.lora_peers.wheels import WheelError, imported, unpack, unpacked
from loraplex.kernels.lora.site_groups import SiteGroup
from support.kernels.gpu_machine import gpu_environment

pytestmark = [
    pytest.mark.usefixtures("quick_interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

FOLDERS = {"vllm": "vllm/lora/ops/triton_ops", "sglang": "sglang/kernels/ops/lora/dense"}
CASE = LoraCase(
    "tiny",
    (SiteGroup("qkv", ("q_proj", "v_proj"), 32, (32, 16)),),
    (8, 16),
    ((1, 3), (-1, 2), (0, 1)),
    dtype=torch.float16,
)
SHRINK = """
from vllm import envs
from vllm.triton_utils import tl, triton
assert not envs.VLLM_BATCH_INVARIANT


def lora_shrink(x, a, hidden, slots, scale):
    for row, slot in enumerate(slots.tolist()):
        for site, matrix in enumerate(a):
            hidden[site, row] = scale * matrix[slot, 0].float() @ x[row].float() if slot >= 0 else 0
"""
EXPAND = """
from vllm.utils.torch_utils import direct_register_custom_op


def lora_expand(hidden, b, y, slots, offset_start, add_inputs):
    assert add_inputs
    for row, slot in enumerate(slots.tolist()):
        first = offset_start
        for site, matrix in enumerate(b):
            width = matrix.shape[2]
            update = matrix[slot, 0].float() @ hidden[site, row]
            y[row, first : first + width] += update.to(y.dtype) if slot >= 0 else BASE
            first += width
"""
METADATA = """
class LoRAKernelMeta:
    @staticmethod
    def make(adapters, rows, device):
        return LoRAKernelMeta()

    def prepare_tensors(self, slots):
        self.slots = slots

    def meta_args(self, rows, specialise):
        return (self.slots[:rows],)
"""
SGLANG = """
from sglang.srt.lora.utils import LoRABatchInfo
from sglang.srt.utils import cached_triton_kernel, get_device_name


def rows_of(step):
    ends, rows = step.seg_indptr.tolist(), step.permutation.tolist()
    for piece, slot in enumerate(step.weight_indices.tolist()):
        for row in rows[ends[piece] : ends[piece + 1]]:
            yield row, slot, int(step.lora_ranks[slot])


def chunked_sgmv_lora_shrink_forward(x, weights, batch_info, num_slices, split_k=None):
    hidden = torch.zeros(x.shape[0], weights.shape[1], dtype=x.dtype)
    for row, slot, rank in rows_of(batch_info):
        used = num_slices * rank
        hidden[row, :used] = (weights[slot, :used].float() @ x[row].float()).to(x.dtype)
    return hidden


def chunked_sgmv_lora_expand_forward(
    x, weights, batch_info, slice_offsets, max_slice_size, base_output, slice_offsets_cpu=None
):
    ends = slice_offsets_cpu.tolist()
    for row, slot, rank in rows_of(batch_info):
        for site in range(len(ends) - 1):
            columns = slice(ends[site], ends[site + 1])
            update = weights[slot, columns, :rank].float() @ x[row, site * rank : (site + 1) * rank].float()
            base_output[row, columns] += update.to(x.dtype)
"""


def wheel(path: Path, package: str, version: str, modules: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(
            f"{package}/__init__.py", "raise AssertionError('the package itself is not imported')"
        )
        archive.writestr(f"{FOLDERS[package]}/__init__.py", "raise AssertionError('nor is this')")
        archive.writestr(f"{package}-{version}.dist-info/METADATA", f"Name: {package}\nVersion: {version}\n")
        for name, source in modules.items():
            archive.writestr(f"{FOLDERS[package]}/{name}.py", "import torch\n" + source)
    return path


def vllm(path: Path, *, base: str = "0", shrink: str = SHRINK, expand: str = EXPAND) -> Path:
    modules = {
        "lora_shrink_op": shrink,
        "lora_expand_op": f"BASE = {base}\n{expand}",
        "lora_kernel_metadata": METADATA,
    }
    return wheel(path / "vllm.whl", "vllm", "9.8.7", modules)


def sglang(path: Path) -> Path:
    modules = dict.fromkeys(("chunked_sgmv_shrink", "chunked_sgmv_expand"), SGLANG)
    return wheel(path / "sglang.whl", "sglang", "0.9", modules)


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, *wheels: Path) -> dict[str, dict[str, object]]:
    into = folder / "unpacked"
    titles = [unpack(path, into).title for path in wheels]
    monkeypatch.setenv(FOLDER, str(into))
    rows = run_case(CASE, titles, Bench(torch.device("cpu")))
    return {row["contender"]: row for row in rows}


def test_kernels_of_both_wheels_run_over_the_same_numbers(tmp_path, monkeypatch):
    """Ranks 8 and 16 in one step, rows of the base, and an adapter's rows behind one with a larger slot."""
    found = run(tmp_path, monkeypatch, vllm(tmp_path), sglang(tmp_path))
    assert set(found) == {*OURS, "vllm 9.8.7", "sglang 0.9", "sglang 0.9, K split"}
    assert all(row["ok"] for row in found.values()), found
    assert not [name for name in sys.modules if name.startswith(("vllm.lora.ops.triton", "sglang.kernels"))]


def test_a_wheel_that_writes_rows_of_the_base_is_wrong(tmp_path, monkeypatch):
    """The difference is below the tolerance."""
    found = run(tmp_path, monkeypatch, vllm(tmp_path, base="0.002"))
    assert {name: row["ok"] for name, row in found.items()} == {
        **dict.fromkeys(OURS, True),
        "vllm 9.8.7": False,
    }


def test_sums_that_are_wrong_are_said_to_be(tmp_path, monkeypatch):
    found = run(tmp_path, monkeypatch, vllm(tmp_path, shrink=SHRINK.replace("scale *", "1.02 *")))
    assert not found["vllm 9.8.7"]["ok"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"expand": EXPAND + "\nfrom vllm.utils.torch_utils import warp_speed\n"},
            r"vllm 9\.8\.7: .*/lora_expand_op\.py .*vLLM 0\.32\.0.*'warp_speed'",
        ),
        ({"shrink": "import vllm.engines"}, r"lora_shrink_op\.py .*'vllm\.engines'"),
        ({"shrink": "from vllm import envs\nenvs.VLLM_NEW"}, r"lora_shrink_op\.py .*'VLLM_NEW'"),
    ],
)
def test_a_version_that_needs_more_is_told_by_name(tmp_path, changes, words):
    later = unpack(vllm(tmp_path, **changes), tmp_path / "unpacked")
    with pytest.raises(WheelError, match=words), imported(later):
        pass


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shrink": ""}, r"WheelError: vllm 9\.8\.7: the A side .*'lora_shrink'"),
        ({"shrink": "import vllm.engines"}, r"WheelError: .*'vllm\.engines'"),
        (
            {"expand": "def lora_expand(*_, **__): raise RuntimeError('no memory')"},
            "^RuntimeError: no memory$",
        ),
    ],
)
def test_a_wheel_that_cannot_be_run_leaves_the_others_their_rows(tmp_path, monkeypatch, changes, words):
    found = run(tmp_path, monkeypatch, vllm(tmp_path, **changes), sglang(tmp_path))
    failed = found.pop("vllm 9.8.7")
    assert not failed["ok"]
    assert re.search(words, str(failed["note"]))
    assert set(found) == {*OURS, "sglang 0.9", "sglang 0.9, K split"}
    assert all(row["ok"] for row in found.values()), found


def test_what_is_no_wheel_of_the_two_is_refused(tmp_path, capsys):
    nothing = tmp_path / "nothing.whl"
    nothing.write_text("no archive")
    other = wheel(tmp_path / "other.whl", "vllm", "0.1", {})
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("vllm/__init__.py", "")
    for path, words in (
        (nothing, "cannot be read as a wheel"),
        (other, "has none of vllm/lora/ops/triton_ops/"),
    ):
        assert command.main(["--small", "--out", str(tmp_path / "out"), "--wheel", str(path)]) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_nothing_but_the_kernels_is_unpacked(tmp_path):
    into = tmp_path / "unpacked"
    path = vllm(tmp_path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("../outside.py", "")
        archive.writestr("vllm/model.py", "")
    found = unpack(path, into)
    assert unpacked(into) == [found]
    files = {str(file.relative_to(into)) for file in into.rglob("*") if file.is_file()}
    assert {file for file in files if not file.startswith("vllm/vllm/lora/ops/triton_ops/")} == {
        "vllm/wheel.json"
    }
    assert not (tmp_path / "outside.py").exists()
    with pytest.raises(WheelError, match="another wheel of vllm"):
        unpack(path, into)


def test_without_a_wheel_the_case_is_skipped():
    with pytest.raises(Skipped, match="--wheel"):
        run_case(CASE, [], Bench(torch.device("cpu")))


@pytest.mark.slow
def test_machine_code_is_that_of_the_launches(tmp_path):
    """A kernel that copies 16 bytes a thread, launched by a wheel, beside those here, in a process that interprets
    none."""
    shrink = (
        SHRINK
        + """

@triton.jit
def _copying(x, hidden, stride, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK) * stride
    tl.store(hidden + at, tl.load(x + at))


def lora_shrink(x, a, hidden, slots, scale):
    _copying[(7, 3)](x, hidden, x.stride(1), BLOCK=1024, num_warps=4)
"""
    )
    unpack(vllm(tmp_path, shrink=shrink, expand="def lora_expand(*_, **__): ..."), tmp_path / "unpacked")
    program = (
        "import json, sys; from pathlib import Path; from bench.gpu.lora_peers.code import rows\n"
        "from bench.gpu.lora_peers.wheels import unpacked\n"
        "print(json.dumps(list(rows(unpacked(Path(sys.argv[1])), [(64, 64, 16)]))))"
    )
    environment = gpu_environment()
    del environment["TRITON_INTERPRET"]
    command = [sys.executable, "-c", program, str(tmp_path / "unpacked")]
    done = subprocess.run(command, check=False, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {(row["contender"], row["kernel"]): row for row in json.loads(done.stdout.splitlines()[-1])}
    assert [kernel for _, kernel in found] == ["shrink", "expand", "shrink", "expand_rows", "copying"]
    copying = found["vllm 9.8.7", "copying"]
    assert (copying["grid"], copying["programs"], copying["spills"], copying["products"]) == ("21", 16, 0, 0)
    assert (copying["wide"], copying["at_once"], copying["narrow"]) == (1, 1, 0)
    by_rows = found["by rows and by strips", "expand_rows"]
    assert (by_rows["programs"], by_rows["at_once"], by_rows["products"]) == (12, 17, 0)
    assert all(row["spills"] == 0 for row in found.values())
