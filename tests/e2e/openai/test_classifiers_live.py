"""Classifiers that PEFT made, uploaded and asked over HTTP: answers equal transformers and PEFT's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.serving.text.processor import TextProcessor
from support.adapters.classifiers import LABELS, PeftClassifier, save_classifiers
from support.servers.live_server import REPOSITORY, Shop, checked, post_version

pytestmark = pytest.mark.slow

TEXTS = ["The sea is calm.", "Owls hunt at night. " * 9, "x"]
_ATTENTION = {"r": 4, "target_modules": ["q_proj", "v_proj", "o_proj"]}
MADE: dict[str, dict[str, Any]] = {
    "mood": {"task_type": "SEQ_CLS", "num_labels": 3, **_ATTENTION},
    "tags": {"task_type": "TOKEN_CLS", "num_labels": 2, "use_dora": True, **_ATTENTION},
    "ranker": {"task_type": "SEQ_CLS", "num_labels": 1, "r": 4, "target_modules": ["k_proj", "up_proj", "down_proj"]},
}  # fmt: skip


def upload(shop: Shop, name: str, folder: Path) -> None:
    parts = ("adapter_config.json", "adapter_model.safetensors", "config.json")
    sent = {part: (part, (folder / part).read_bytes()) for part in parts if (folder / part).exists()}
    checked(post_version(shop.server.admin, f"tenants/acme/adapters/{name}/versions", sent), 201)


@pytest.fixture(scope="module")
def made(tiny: Shop, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The three classifiers on the tiny server, by name."""
    folders = save_classifiers(tiny_model, tmp_path_factory.mktemp("classifiers"), MADE)
    config = {"id2label": dict(enumerate(LABELS)), "pad_token_id": 0}
    (folders["mood"] / "config.json").write_text(json.dumps(config))
    for name, folder in folders.items():
        upload(tiny, name, folder)
    return folders


@pytest.fixture
def busy(tiny: Shop) -> Iterator[None]:
    """Streams of the base and of an adapter without a head, from before a test until behind it."""
    opened = [
        tiny.openai().completions.create(
            model=model, prompt="Once", max_tokens=50_000, stream=True, extra_body={"ignore_eos": True}
        )
        for model in ("tiny", "a")
    ]
    for stream in opened:
        next(iter(stream))
    yield
    assert tiny.server.stats()["num_running"] >= 2, "they generated all the while"
    for stream in opened:
        stream.close()


def post(shop: Shop, path: str, **body: Any) -> dict[str, Any]:
    with shop.client() as client:
        answer: dict[str, Any] = checked(client.post(path, json=body))
        return answer


@pytest.fixture(scope="module")
def text(tiny_model: Path) -> TextProcessor:
    return TextProcessor(tiny_model, max_model_len=4096)


def near(numbers: torch.Tensor) -> Any:
    return pytest.approx(numbers.tolist(), abs=1e-4)


def test_classes_equal_peft_s_beside_streams(
    tiny: Shop, made: dict[str, Path], tiny_model: Path, text: TextProcessor, busy: None
) -> None:
    answer = post(tiny, "/classify", model="mood", input=TEXTS)
    raw = post(tiny, "/classify", model="mood", input=TEXTS, use_activation=False)
    reference = PeftClassifier(tiny_model, made["mood"], 3)
    for item, logits, prompt in zip(answer["data"], raw["data"], TEXTS, strict=True):
        want = reference.logits(text.encode(prompt))
        assert logits["probs"] == near(want)
        assert item["probs"] == near(want.softmax(-1))
        assert item["label"] == LABELS[int(want.argmax())]
    ends = [*text.encode("x"), 0, 0]  # as of pad_token_id
    (item,) = post(tiny, "/classify", model="mood", input=ends, use_activation=False)["data"]
    assert item["probs"] == near(reference.logits(ends))
    assert item["probs"] == near(reference.logits(ends[:-2]))
    reference = PeftClassifier(tiny_model, made["tags"], 2)
    answer = post(tiny, "/classify", model="tags", input=TEXTS[0], use_activation=False)
    want = reference.logits(text.encode(TEXTS[0]))
    assert [token["token_id"] for token in answer["data"][0]["tokens"]] == text.encode(TEXTS[0])
    for token, row in zip(answer["data"][0]["tokens"], want, strict=True):
        assert token["probs"] == near(row)
        assert token["label"] == f"LABEL_{int(row.argmax())}"


def test_documents_rank_as_peft_scores_them_and_share_the_query(
    tiny: Shop, made: dict[str, Path], tiny_model: Path, text: TextProcessor, busy: None
) -> None:
    query, documents = (
        "Which bird hunts at night, and where does it sleep? " * 2,
        ["the owl", "a ship", "the sea"],
    )
    scored = post(tiny, "/score", model="ranker", text_1=query, text_2=documents)
    cached = scored["usage"]["prompt_tokens_details"]["cached_tokens"]
    again = post(tiny, "/score", model="ranker", text_1=query, text_2=["another document"])
    assert (
        again["usage"]["prompt_tokens_details"]["cached_tokens"]
        >= len(text.encode(query)) // 16 * 16
        > 0
        <= cached
    )
    reference = PeftClassifier(tiny_model, made["ranker"], 1)
    wants = [reference.logits(text.encode_pair(query, document)).sigmoid() for document in documents]
    assert [item["score"] for item in scored["data"]] == near(torch.cat(wants))
    ranked = post(tiny, "/v1/rerank", model="ranker", query=query, documents=documents, top_n=2)
    order = sorted(range(3), key=lambda index: -float(wants[index]))[:2]
    assert [item["index"] for item in ranked["results"]] == order
    assert [item["relevance_score"] for item in ranked["results"]] == near(
        torch.cat([wants[i] for i in order])
    )


def test_a_classifier_s_vectors_are_those_of_its_adapter(
    tiny: Shop, made: dict[str, Path], tiny_model: Path, text: TextProcessor
) -> None:
    vector = post(tiny, "/v1/embeddings", model="mood", input=TEXTS[0], pooling="last", normalize=False)
    want = PeftClassifier(tiny_model, made["mood"], 3).hidden(text.encode(TEXTS[0]))[-1]
    assert vector["data"][0]["embedding"] == near(want)
    with tiny.client() as client:
        refused = client.post("/v1/completions", json={"model": "mood", "prompt": "x"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
    assert "classifies texts (negative, neutral, positive)" in refused.json()["error"]["message"]


def test_the_example_s_classifier_has_peft_s_accuracy(tiny: Shop, tiny_model: Path, tmp_path: Path) -> None:
    """On the same 200 sentences: every label is PEFT's."""
    spec = spec_from_file_location("train_classifier", REPOSITORY / "examples" / "train_classifier.py")
    assert spec is not None
    assert spec.loader is not None
    example = module_from_spec(spec)
    spec.loader.exec_module(example)
    example.train(tiny_model, tmp_path, steps=12)
    upload(tiny, "moods", tmp_path)
    by_peft, by_server, differ = example.compare(
        tiny_model, tmp_path, tiny.server.data_url, tiny.key, "moods"
    )
    assert (by_server, differ) == (by_peft, 0)
