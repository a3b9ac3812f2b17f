"""Images of adapters that change by token: laid out, kept on the disk, and read back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.admission.inspection import inspect_adapter
from loraplex.adapters.device.arena import AdapterArena
from loraplex.adapters.device.host_image import HostImage, build_image
from loraplex.adapters.device.host_slab import loose_pages
from loraplex.adapters.device.image_files import ImageFiles, image_key
from loraplex.adapters.device.layout import ArenaLayout
from loraplex.engine.execution.inputs import PlainInputs
from loraplex.kernels.backend import resolve_kernels
from loraplex.kernels.lora.site_groups import HEAD, SiteGroup
from support.adapters.drafts import AdapterFiles, TinyBase, draft_adapter, write_base

ARCH = TinyBase(tied=True, vocab=1000)
V, C, RANK = ARCH.vocab, ARCH.hidden, 11
GROUPS = (
    SiteGroup("qkv", ("q_proj", "k_proj", "v_proj"), 32, (32, 16, 16)),
    SiteGroup("o", ("o_proj",), 32, (32,)),
)


@pytest.fixture(params=["float32", "bfloat16"])
def layout(request: pytest.FixtureRequest) -> ArenaLayout:
    head = SiteGroup(HEAD, (HEAD,), C, (V,))
    return ArenaLayout(
        GROUPS, 2, getattr(torch, request.param), max_rank=16, page_bytes=4096, head=head, embedding=(V, C)
    )


@pytest.fixture
def made(tmp_path: Path, layout: ArenaLayout) -> tuple[HostImage, AdapterFiles]:
    """LoRA on the embedding over many pages, and rows of the head."""
    draft = draft_adapter(ARCH, rank=RANK, target_modules=["q_proj", "v_proj", "embed_tokens"])
    draft.config["trainable_token_indices"] = {"lm_head": list(range(900, 500, -2))}
    rng = np.random.default_rng(5)
    module = "base_model.model.model.embed_tokens"
    draft.tensors[f"{module}.lora_embedding_A"] = rng.standard_normal((RANK, V)).astype(np.float32)
    draft.tensors[f"{module}.lora_embedding_B"] = rng.standard_normal((C, RANK)).astype(np.float32)
    rows = rng.standard_normal((200, C)).astype(np.float32)
    draft.tensors["base_model.model.lm_head.token_adapter.trainable_tokens_delta"] = rows
    files = draft.write(tmp_path / "adapter")
    base = load_base_spec(write_base(tmp_path / "base", ARCH))
    spec = inspect_adapter(files.config, files.tensors, base, max_rank=16)
    made = build_image(spec, files.tensors, layout)
    assert made.num_pages > 10
    return made, files


def looked_up(layout: ArenaLayout, image: HostImage) -> tuple[torch.Tensor, torch.Tensor]:
    """What every token's embedding is changed by, and the logits of one row."""
    arena = AdapterArena(layout, image.num_pages + 3, 2, resolve_kernels("torch", torch.device("cpu")))
    arena.write(image, 1, tuple(range(2, image.num_pages + 2)))
    found = arena.token_pass([(1, 0, V)], [(1, 0, 1)], PlainInputs(torch.device("cpu")))
    assert found is not None
    y = torch.zeros(V, C, dtype=layout.dtype)
    found.add_embeddings(torch.arange(V), y, 1.0)
    logits = torch.zeros(1, V, dtype=layout.dtype)
    found.replace_logits(torch.ones(1, C, dtype=layout.dtype), logits)
    arena.clear_slot(1)
    assert arena.token_pass([(0, 0, 1)], [], PlainInputs(torch.device("cpu"))) is None
    return y, logits


def test_every_token_is_looked_up_where_it_lies(
    layout: ArenaLayout, made: tuple[HostImage, AdapterFiles]
) -> None:
    from safetensors.numpy import load_file

    image, files = made
    tensors = {name.rpartition("_")[2].rpartition(".")[2]: t for name, t in load_file(files.tensors).items()}
    y, logits = looked_up(layout, image)
    expected = torch.from_numpy(tensors["A"].T @ tensors["B"].T * (8 / RANK))
    scale = float(expected.abs().max())
    error = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[layout.dtype] * scale
    assert (y.float() - expected).abs().max() < error
    wanted = torch.zeros(1, V)
    wanted[0, list(range(900, 500, -2))] = torch.from_numpy(tensors["delta"]).sum(1)
    assert (logits.float() - wanted).abs().max() < error


def test_an_image_comes_back_from_the_disk_as_it_was(
    layout: ArenaLayout, made: tuple[HostImage, AdapterFiles], tmp_path: Path
) -> None:
    image, _ = made
    images = ImageFiles(tmp_path / "images", image_key(layout, "base"), 1 << 30)
    assert images.write(image, lambda: True)
    found = images.read_image(image.digest, lambda n: loose_pages(n, layout.page_bytes), lambda: True)
    assert found is not None
    np.testing.assert_array_equal(found.rows, image.rows)
    np.testing.assert_array_equal(found.tokens, image.tokens)
    for one, other in zip(looked_up(layout, image), looked_up(layout, found), strict=True):
        assert torch.equal(one, other)


def test_a_head_over_several_pages_is_read_back(tmp_path: Path, layout: ArenaLayout) -> None:
    """In float32 whatever the layout's dtype, beside rows that are replaced."""
    layout.hidden_size = C
    rng = np.random.default_rng(8)
    weight, bias = rng.standard_normal((70, C)).astype(np.float32), rng.standard_normal(70)
    draft = draft_adapter(ARCH, task_type="TOKEN_CLS", modules_to_save=["classifier", "score"])
    draft.config["trainable_token_indices"] = {"lm_head": [5, 7]}
    draft.tensors |= {
        "base_model.model.lm_head.token_adapter.trainable_tokens_delta": weight[:2],
        "base_model.model.score.bias": bias,
        "base_model.model.score.weight": weight.astype(np.float16),
    }
    files = draft.write(tmp_path / "adapter")
    base = load_base_spec(write_base(tmp_path / "base", ARCH))
    spec = inspect_adapter(files.config, files.tensors, base, max_rank=16)
    image = build_image(spec, files.tensors, layout)
    kept = ImageFiles(tmp_path / "images", image_key(layout, "base"), 1 << 30)
    assert kept.write(image, lambda: True)
    again = kept.read_image(spec.digest, lambda n: loose_pages(n, layout.page_bytes), lambda: True)
    assert again is not None
    x = torch.from_numpy(rng.standard_normal((3, C)).astype(np.float32))
    want = x.numpy() @ weight.astype(np.float16).astype(np.float32).T + bias
    for each in (image, again):
        arena = AdapterArena(layout, each.num_pages + 3, 2, resolve_kernels("torch", torch.device("cpu")))
        arena.write(each, 1, tuple(reversed(range(2, 2 + each.num_pages))))
        rows = arena.head_rows(1)
        assert rows is not None
        assert arena.head_rows(0) is None
        pairs = torch.arange(3).repeat_interleave(70)
        found = arena.head_logits(torch.from_numpy(np.tile(rows, 3)), x, pairs).view(3, 70)
        np.testing.assert_allclose(found.numpy(), want, atol=1e-5)
        arena.clear_slot(1)
        assert arena.head_rows(1) is None
