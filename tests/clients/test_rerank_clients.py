"""Cohere's clients and vLLM's documented requests, unchanged, against a data plane whose engine is scripted."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import httpx
import pytest

from loraplex.adapters.pooled import Head
from support.clients.outside_clients import INSTALLED, SCRIPTS, skip_unless_installed
from support.http.data_plane import BASE, running_data_plane

pytestmark = pytest.mark.slow

QUERY, DOCUMENTS = "sea", ["tide", "owl", "hat"]


def test_cohere_s_clients_and_vllm_s_requests(tmp_path: Path) -> None:
    skip_unless_installed("cohere")
    with running_data_plane(tmp_path) as plane:
        moods = Head("classify", ("sad", "glad", "calm"), "single_label_classification")
        plane.resolver.heads = {"json": Head("classify", ("LABEL_0",), "regression"), "pirate": moods}
        given = {"url": plane.url, "key": "lpx_acme", "ranker": "json", "moods": "pirate", "base": BASE}
        done = subprocess.run(
            [
                str(INSTALLED / "cohere" / "bin" / "python"),
                str(SCRIPTS / "cohere_conversation.py"),
                json.dumps(given | {"query": QUERY, "documents": DOCUMENTS}),
            ],
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        own = httpx.post(
            f"{plane.url}/score",
            json={"model": "json", "text_1": QUERY, "text_2": DOCUMENTS},
            headers={"authorization": "Bearer lpx_acme"},
        ).json()["data"]
    scores = [[item["index"], item["score"]] for item in own]
    ranked = sorted(scores, key=lambda pair: -pair[1])
    assert found["v1"] == found["v2"] == ranked
    assert found["v2 top"] == ranked[:1]
    assert found["v1 documents"] == [DOCUMENTS[index] for index, _ in ranked]
    assert found["v1 tokens"] == sum(len(QUERY + document) for document in DOCUMENTS)
    assert found["a model without a head"] == [400, "model"]
    assert found["cut documents"] == [400, "max_tokens_per_doc"]
    assert [(item[0], *item[2:]) for item in found["classify"]] == [(index, 3, 3) for index in range(3)]
    assert found["classify one"] == found["classify"][0][1]
    assert found["score each"] == found["score all"] == scores
    assert found["score one"] == scores[:1]
