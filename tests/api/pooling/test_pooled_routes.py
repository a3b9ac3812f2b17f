"""`/classify`, `/score` and `/v1/rerank`: the wires of vLLM, Cohere and Jina, on the way that every request goes."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from typing import Any

import httpx
import jsonschema
import numpy as np
import pytest

from loraplex.adapters.pooled import EmbeddingSpec, Head, HeadTask, ProblemType
from loraplex.api.pooling import prompts, schemas
from loraplex.api.pooling.answers import activated, relevance
from loraplex.engine.types import EngineRequest, SamplingParams
from support.engine.fake_engine import HIDDEN_SIZE, Reply, fake_engine_info, fake_pooled
from support.http.data_plane import BASE, MAX_MODEL_LEN, DataPlane
from support.waiting import eventually

KEY = {"authorization": "Bearer lpx_acme"}
MOODS = ("sad", "glad", "calm")
CLASSIFY, SCORE = ("/classify", "/v1/classify"), ("/score", "/v1/score")
RERANK = ("/v1/rerank", "/rerank", "/v2/rerank")


def head(
    *labels: str, task: HeadTask = "classify", kind: ProblemType = "single_label_classification"
) -> Head:
    return Head(task, labels, kind)


@pytest.fixture
def heads(plane: DataPlane) -> DataPlane:
    """`pirate` classifies moods, `json` is a reranker."""
    plane.resolver.heads = {"pirate": head(*MOODS), "json": head("LABEL_0", kind="regression")}
    return plane


def post(plane: DataPlane, path: str, **body: Any) -> httpx.Response:
    return plane.http.post(plane.url + path, json=body, headers=KEY)


def logits_of(plane: DataPlane, text: str, adapter: str, task: HeadTask = "classify") -> list[float]:
    """The engine's own of a text: a token is a byte."""
    ref = plane.resolver.adapters["acme", adapter][1]
    packed = fake_pooled(
        EngineRequest("x", "acme", tuple(text.encode()), SamplingParams(0), ref, pooling=task)
    )
    assert packed is not None
    return list(struct.unpack(f"<{len(packed) // 4}f", packed))


def softmax(logits: list[float]) -> list[float]:
    powers = [math.exp(logit - max(logits)) for logit in logits]
    return [power / sum(powers) for power in powers]


def sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))


@pytest.mark.parametrize("path", CLASSIFY)
def test_classes_as_vllm_writes_them(heads: DataPlane, path: str) -> None:
    texts = ["sea", "a ship", "hat"]
    answer = post(heads, path, model="pirate", input=texts)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["id"].startswith("classify-")
    assert (body["object"], body["model"], body["created"] > 0) == ("list", "pirate", True)
    counts = {"prompt_tokens": 12, "total_tokens": 12, "completion_tokens": 0}
    assert body["usage"] == counts | {"prompt_tokens_details": {"cached_tokens": 0}}
    assert [item["index"] for item in body["data"]] == [0, 1, 2]
    for text, item in zip(texts, body["data"], strict=True):
        probs = softmax(logits_of(heads, text, "pirate"))
        assert item["probs"] == pytest.approx(probs, abs=1e-12)
        assert (item["label"], item["num_classes"]) == (MOODS[probs.index(max(probs))], 3)
    assert len({item["label"] for item in body["data"]}) > 1
    assert answer.headers["x-loraplex-adapter"] == "pirate@v2"
    assert {request.pooling for request in heads.engine.requests} == {"classify"}
    document = heads.http.get(f"{heads.url}/openapi.json").json()
    schema = {"$ref": "#/components/schemas/Classification", "components": document["components"]}
    jsonschema.validate(body, schema)


def test_a_models_card_has_its_head(heads: DataPlane) -> None:
    """For a page that shows labels by name: an answer names the likeliest alone. Lists have none."""
    url = f"{heads.url}/v1/models"
    cards = {
        name: heads.http.get(f"{url}/{name}", headers=KEY).json() for name in ("pirate@v2", "json", BASE)
    }
    text = {"task": "classify", "labels": list(MOODS), "problem_type": "single_label_classification"}
    assert cards["pirate@v2"]["head"] == text
    assert cards["json"]["head"]["problem_type"] == "regression"
    assert cards[BASE]["head"] is None
    assert all("head" not in card for card in heads.http.get(url, headers=KEY).json()["data"])


@pytest.mark.parametrize("given", ["sea", ["sea"], [5, 6, 7], [[5, 6], [7]]])
def test_every_kind_of_input(heads: DataPlane, given: Any) -> None:
    answer = post(heads, "/classify", model="pirate", input=given, use_activation=False)
    expected = [
        logits_of(heads, bytes(request.prompt_ids).decode(), "pirate") for request in heads.engine.requests
    ]
    assert [item["probs"] for item in answer.json()["data"]] == expected


@pytest.mark.parametrize(("given", "pooled"), [([5, 0, 6, 0, 0], [5, 0, 6]), ([0, 0], [0]), ([5, 6], [5, 6])])
def test_a_text_that_ends_with_padding_is_pooled_before_it(
    heads: DataPlane, given: list[int], pooled: list[int]
) -> None:
    heads.resolver.heads["pirate"] = replace(head(*MOODS), pad_id=0)
    assert post(heads, "/classify", model="pirate", input=given).status_code == 200
    assert [list(request.prompt_ids) for request in heads.engine.requests] == [pooled]


def test_a_head_for_tokens_answers_each(heads: DataPlane) -> None:
    heads.resolver.heads["pirate"] = head(*MOODS, task="token_classify")
    (item,) = post(heads, "/classify", model="pirate", input="sea").json()["data"]
    rows = np.array(logits_of(heads, "sea", "pirate", "token_classify")).reshape(3, 3).tolist()
    assert [token["token_id"] for token in item["tokens"]] == list(b"sea")
    for row, token in zip(rows, item["tokens"], strict=True):
        assert token["probs"] == pytest.approx(softmax(row), abs=1e-12)
        assert token["label"] == MOODS[row.index(max(row))]
    assert heads.engine.requests[0].pooling == "token_classify"


@pytest.mark.parametrize(
    ("kind", "raw", "numbers"),
    [
        ("single_label_classification", False, softmax([1000.0, 999.0])),
        ("multi_label_classification", False, [1.0, 1.0]),
        ("regression", False, [1000.0, 999.0]),
        ("single_label_classification", True, [1000.0, 999.0]),
    ],
)  # fmt: skip
def test_problem_types(kind: ProblemType, raw: bool, numbers: list[float]) -> None:
    found = activated(struct.pack("<2f", 1000.0, 999.0), head("a", "b", kind=kind), raw=raw)
    assert found[0].tolist() == pytest.approx(numbers)


def test_a_score_of_one_label_and_of_two() -> None:
    assert relevance(struct.pack("<f", -800.0), head("a", kind="regression"), raw=False) == 0.0
    assert relevance(struct.pack("<f", 2.0), head("a"), raw=True) == 2.0
    two = struct.pack("<2f", 1.0, 3.0)
    assert relevance(two, head("no", "yes"), raw=False) == pytest.approx(softmax([1.0, 3.0])[1])
    assert relevance(two, head("no", "yes", kind="multi_label_classification"), raw=False) == sigmoid(3.0)


@pytest.mark.parametrize("path", RERANK)
def test_documents_come_by_their_scores(heads: DataPlane, path: str) -> None:
    documents: list[Any] = ["tide", {"text": "owl"}, "hat", "bc"]
    texts = ["tide", "owl", "hat", "bc"]
    answer = post(heads, path, model="json", query="sea", documents=documents, return_documents=True)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    scores = [sigmoid(logits_of(heads, "sea" + text, "json")[0]) for text in texts]
    order = sorted(range(4), key=lambda index: (-scores[index], index))
    assert order == [1, 3, 0, 2], "the scores differ"
    assert [(item["index"], item["document"]["text"]) for item in body["results"]] == [
        (index, texts[index]) for index in order
    ]
    assert [item["relevance_score"] for item in body["results"]] == pytest.approx(sorted(scores)[::-1])
    tokens = sum(3 + len(text) for text in texts)
    assert body["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert body["meta"]["tokens"] == {"input_tokens": tokens, "output_tokens": 0}
    best = post(heads, path, model="json", query="sea", documents=documents, top_n=2).json()
    assert best["results"] == [
        {k: item[k] for k in ("index", "relevance_score")} for item in body["results"][:2]
    ]
    document = heads.http.get(f"{heads.url}/openapi.json").json()
    jsonschema.validate(
        body, {"$ref": "#/components/schemas/Reranking", "components": document["components"]}
    )


@pytest.mark.parametrize("path", SCORE)
@pytest.mark.parametrize("sides", [("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")])
@pytest.mark.parametrize(
    ("left", "right", "pairs"),
    [
        ("sea", "ship", ["seaship"]),
        ("sea", ["ship", "hat"], ["seaship", "seahat"]),
        (["sea", "land"], ["ship", "hat"], ["seaship", "landhat"]),
    ],
)
def test_pairs_are_scored_in_their_order(
    heads: DataPlane, path: str, sides: tuple[str, str], left: Any, right: Any, pairs: list[str]
) -> None:
    body = post(heads, path, model="json", **dict(zip(sides, (left, right), strict=True))).json()
    assert [bytes(request.prompt_ids).decode() for request in heads.engine.requests] == pairs
    assert [(item["index"], item["object"]) for item in body["data"]] == [
        (index, "score") for index in range(len(pairs))
    ]
    scores = [sigmoid(logits_of(heads, pair, "json")[0]) for pair in pairs]
    assert [item["score"] for item in body["data"]] == pytest.approx(scores)


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/classify", {"model": "pirate"}, "input"),
        ("/classify", {"model": "pirate", "input": []}, "input"),
        ("/classify", {"model": "pirate", "input": ["a", ""]}, "input"),
        ("/classify", {"model": "pirate", "input": "a" * (MAX_MODEL_LEN + 1)}, "input"),
        ("/classify", {"model": "pirate", "input": "a", "messages": [{"role": "user"}]}, "messages"),
        ("/v1/rerank", {"model": "json", "query": "", "documents": ["a"]}, "query"),
        ("/v1/rerank", {"model": "json", "query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"model": "json", "query": "a", "documents": "b"}, "documents"),
        ("/v1/rerank", {"model": "json", "query": "a", "documents": [{"title": "b"}]}, "documents"),
        ("/v1/rerank", {"model": "json", "query": "a", "documents": ["b"] * 1001}, "documents"),
        ("/v1/rerank", {"model": "json", "query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"model": "json", "query": "a", "documents": ["b" * MAX_MODEL_LEN]}, "documents"),
        ("/v1/rerank", {"model": "json", "query": "a", "documents": ["b"], "rank_fields": ["c"]}, "rank_fields"),
        ("/score", {"model": "json", "text_1": "a"}, "text_1"),
        ("/score", {"model": "json", "text_1": "a", "documents": "b"}, "text_1"),
        ("/score", {"model": "json", "text_1": ["a", "b"], "text_2": ["c"]}, "text_2"),
        ("/score", {"model": "json", "queries": ["a", "b"], "documents": ["c", "d", "e"]}, "documents"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(heads: DataPlane, path: str, body: Any, told: str) -> None:
    answer = post(heads, path, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, told), error
    assert "'prompt'" not in error["message"]
    assert heads.engine.requests == []


@pytest.mark.parametrize(
    ("path", "model", "body", "told"),
    [
        ("/v1/completions", "pirate", {"prompt": "x", "stream": True}, "(sad, glad, calm), and writes no text"),
        ("/v1/chat/completions", "pirate", {"messages": [{"role": "user", "content": "x"}]}, "writes no text"),
        ("/v1/responses", "pirate", {"input": "x"}, "writes no text"),
        ("/classify", BASE, {"input": "x"}, "writes text and has no head"),
        ("/v1/rerank", BASE, {"query": "x", "documents": ["y"]}, "writes text and has no head"),
        ("/score", "pirate", {"text_1": "x", "text_2": "y"}, "a reranker has one label"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_says_what_it_is(
    heads: DataPlane, path: str, model: str, body: Any, told: str
) -> None:
    error = post(heads, path, model=model, **body).json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_field", "model")
    assert told in error["message"]


def test_a_classifier_gives_its_hidden_states(heads: DataPlane) -> None:
    assert post(heads, "/v1/embeddings", model="pirate", input="x").status_code == 200


def test_a_base_model_that_classifies(plane: DataPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plane.engine, "_info", fake_engine_info(head=head("no", "yes")))
    assert post(plane, "/classify", model=BASE, input="sea").json()["data"][0]["num_classes"] == 2
    assert post(plane, "/v1/completions", model=BASE, prompt="sea").status_code == 400


def test_work_is_bounded(heads: DataPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    """A query counts with each of its documents, and a head for tokens with each of them."""
    rerank = {"model": "json", "query": "a" * 50, "documents": ["b"] * 20}
    heads.resolver.heads["pirate"] = head(*MOODS, task="token_classify")
    for where, name, path, body in (
        (schemas, "MAX_PAIR_CHARS", "/v1/rerank", rerank),
        (prompts, "MAX_PAIR_TOKENS", "/v1/rerank", rerank),
        (prompts, "MAX_NUMBERS", "/classify", {"model": "pirate", "input": "a" * 400}),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(where, name, 1019)
            assert post(heads, path, **body).status_code == 400, name
        assert post(heads, path, **body).status_code == 200


def test_it_is_charged_for_its_prompts_alone(heads: DataPlane) -> None:
    assert post(heads, "/v1/rerank", model="json", query="sea", documents=["a", "bc"]).status_code == 200
    ((_, reserved),) = heads.limiter.reserved.items()
    expected = {"tenant": "acme", "prompt_tokens": 9, "asked_tokens": 0, "default_tokens": 0, "n": 2}
    assert reserved == expected
    eventually(lambda: len(heads.limiter.settled) == 1)
    assert heads.limiter.settled[0][1] == 9
    assert heads.ledger.rows[-1].endpoint == "/v1/rerank"


def test_a_failure_ends_all_of_it(heads: DataPlane) -> None:
    heads.engine.script(Reply(), Reply(error=("adapter_unavailable", "no room")), Reply(hold=True))
    answer = post(heads, "/v1/rerank", model="json", query="sea", documents=["a", "b", "c"])
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "adapter_unavailable")
    eventually(lambda: not heads.engine.live)


class TestTrainedVectors:
    @pytest.fixture(autouse=True)
    def spec(self, plane: DataPlane) -> None:
        plane.resolver.embeddings["pirate"] = EmbeddingSpec("last", normalize=False, dimensions=2)

    def test_the_version_s_own_are_the_default(self, plane: DataPlane) -> None:
        answer = post(plane, "/v1/embeddings", model="pirate", input="sea").json()
        assert answer["data"][0]["embedding"] == [3.0, float(sum(b"sea"))]
        assert plane.engine.requests[0].pooling == "last"

    def test_the_request_may_choose(self, plane: DataPlane) -> None:
        asked = {"pooling": "mean", "normalize": True, "dimensions": 1}
        answer = post(plane, "/v1/embeddings", model="pirate", input="sea", **asked).json()
        assert (answer["data"][0]["embedding"], plane.engine.requests[0].pooling) == ([1.0], "mean")
        more = post(plane, "/v1/embeddings", model="pirate", input="sea", dimensions=HIDDEN_SIZE + 1)
        assert (more.status_code, more.json()["error"]["param"]) == (400, "dimensions")
