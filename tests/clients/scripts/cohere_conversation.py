"""Rerankings by Cohere's clients, and requests as vLLM documents them. Prints one JSON object: the value of each."""

from __future__ import annotations

import json
import sys
from typing import Any

import cohere
import httpx

given = json.loads(sys.argv[1])
URL, KEY, RANKER, MOODS = given["url"], given["key"], given["ranker"], given["moods"]
QUERY, DOCUMENTS = given["query"], given["documents"]
found: dict[str, Any] = {}


def told(answer: Any) -> list[tuple[int, float]]:
    return [(result.index, result.relevance_score) for result in answer.results]


def refused(call: Any, **fields: Any) -> Any:
    try:
        call(**fields)
    except cohere.core.api_error.ApiError as error:
        return error.status_code, error.body["error"]["param"]
    return None


v1 = cohere.Client(KEY, base_url=URL)
v2 = cohere.ClientV2(KEY, base_url=URL)
asked = {"model": RANKER, "query": QUERY, "documents": DOCUMENTS}
found["v1"] = told(v1.rerank(**asked))
found["v2"] = told(v2.rerank(**asked))
found["v2 top"] = told(v2.rerank(**asked, top_n=1, max_tokens_per_doc=4096))
with_texts = v1.rerank(
    model=RANKER, query=QUERY, documents=[{"text": text} for text in DOCUMENTS], return_documents=True
)
found["v1 documents"] = [result.document.text for result in with_texts.results]
found["v1 tokens"] = with_texts.meta.tokens.input_tokens
found["a model without a head"] = refused(v2.rerank, **asked | {"model": given["base"]})
found["cut documents"] = refused(v2.rerank, **asked, max_tokens_per_doc=16)

http = httpx.Client(base_url=URL, headers={"authorization": f"Bearer {KEY}", "accept": "application/json"})


def post(path: str, **body: Any) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


found["classify"] = [
    (item["index"], item["label"], item["num_classes"], len(item["probs"]))
    for item in post("/classify", model=MOODS, input=DOCUMENTS)["data"]
]
found["classify one"] = post("/classify", model=MOODS, input=DOCUMENTS[0])["data"][0]["label"]
for name, sides in {
    "score one": {"text_1": QUERY, "text_2": DOCUMENTS[0]},
    "score each": {"text_1": [QUERY] * len(DOCUMENTS), "text_2": DOCUMENTS},
    "score all": {"queries": QUERY, "documents": DOCUMENTS},
}.items():
    answer = post("/score", model=RANKER, encoding_format="float", **sides)
    found[name] = [(item["index"], item["score"]) for item in answer["data"]]
print(json.dumps(found))
