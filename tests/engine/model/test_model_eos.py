"""What ends an answer: every id that the checkpoint names, and the token that ends a turn of the family's chats."""

from __future__ import annotations

import json

import pytest

from loraplex.adapters.end_tokens import read_end_tokens
from loraplex.adapters.errors import BaseModelInvalid
from support.engine.local_engine import LocalEngine
from support.models.checkpoints import FAMILIES, save_tiny

pytestmark = pytest.mark.usefixtures("one_torch_thread")

OLD_TOKENIZER = {"added_tokens_decoder": {"1": {"content": "<eos>"}, "107": {"content": "<end_of_turn>"}}}
NEW_TOKENIZER = {"added_tokens": [{"id": 1, "content": "<eos>"}, {"id": 106, "content": "<end_of_turn>"}]}


def write(path, **files):
    for name, value in files.items():
        (path / f"{name}.json").write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({"config": {"model_type": "llama", "eos_token_id": 2}}, {2}),
        ({"config": {"eos_token_id": 2}, "generation_config": {"eos_token_id": [5, 9]}}, {5, 9}),
        ({"config": {"eos_token_id": [3, 4]}, "generation_config": {"eos_token_id": None}}, {3, 4}),
        ({"config": {"eos_token_id": None}}, set()),
        # Gemma 2's own files name the end of a text alone.
        (
            {"config": {"model_type": "gemma2", "eos_token_id": 1}, "tokenizer_config": OLD_TOKENIZER},
            {1, 107},
        ),
        (
            {
                "config": {"model_type": "gemma3_text", "eos_token_id": 1},
                "generation_config": {"eos_token_id": [1, 106]},
                "tokenizer": NEW_TOKENIZER,
                "tokenizer_config": {},
            },
            {1, 106},
        ),
        ({"config": {"model_type": "gemma3", "eos_token_id": 1}, "tokenizer": NEW_TOKENIZER}, {1, 106}),
        # To another family the name of a token means nothing.
        ({"config": {"model_type": "llama", "eos_token_id": 1}, "tokenizer": NEW_TOKENIZER}, {1}),
        (
            {
                "config": {"model_type": "phi3", "eos_token_id": 32000},
                "tokenizer": {"added_tokens": [{"id": 32007, "content": "<|end|>"}, {"content": "<|end|>"}, 7]},
            },
            {32000, 32007},
        ),
        ({"config": {"model_type": "gemma2", "eos_token_id": 1}}, {1}),
    ],
)  # fmt: skip
def test_the_ids_that_end_an_answer(files, ids, tmp_path):
    write(tmp_path, **files)
    assert set(read_end_tokens(tmp_path).ids) == ids


@pytest.mark.parametrize("name", ["generation_config", "config", "tokenizer"])
def test_a_file_that_cannot_be_read_is_named(name, tmp_path):
    write(tmp_path, config={"model_type": "gemma2"})
    for text in ("{", "[1]"):
        (tmp_path / f"{name}.json").write_text(text)
        with pytest.raises(BaseModelInvalid, match=rf"/{name}\.json"):
            read_end_tokens(tmp_path)


def test_an_answer_ends_at_any_of_them(tmp_path):
    base = save_tiny(tmp_path / "base", FAMILIES["gemma2"])
    write(base, generation_config={"eos_token_id": []})

    def answer(number: int, turn_ends=(), **sampling) -> list[int]:
        engine = LocalEngine(
            base, tmp_path / str(number), max_model_len=64, max_num_seqs=2, kv_cache_memory=1 << 20,
            adapter_memory=4 << 20, adapter_cpu_memory=4 << 20, num_threads=1, turn_ends=turn_ends,
        )  # fmt: skip
        engine.add("a", [5, 9, 2, 77], max_tokens=16, temperature=4.0, seed=1, **sampling)
        engine.run()
        engine.close()
        ends = engine.built.info.end_tokens
        assert engine.built.info.eos_ids == tuple(end.id for end in ends)
        if turn_ends:
            assert "the chat template" in {source for end in ends for source in end.sources}
        return engine.tokens("a")

    whole = answer(0)
    early, late = dict.fromkeys(whole[2:5]), dict.fromkeys(whole[6:])
    first = next(token for token in early if token not in whole[:2])
    second = next(token for token in late if token not in whole[:6])
    # Each in turn: one from a list, one from the tokenizer alone.
    write(base, generation_config={"eos_token_id": [0, first]})
    assert answer(1, ignore_eos=False) == whole[: whole.index(first) + 1]
    write(base, generation_config={"eos_token_id": 0})
    write(base, tokenizer={"added_tokens": [{"id": second, "content": "<end_of_turn>"}]})
    assert answer(2, ignore_eos=False) == whole[: whole.index(second) + 1]
    # The chat template's, which the app reads.
    write(base, generation_config={"eos_token_id": []})
    write(base, tokenizer={"added_tokens": [{"id": second, "content": "<|im_end|>"}]})
    assert answer(4, ignore_eos=False, turn_ends=("<|im_end|>",)) == whole[: whole.index(second) + 1]
    assert answer(3) == whole
