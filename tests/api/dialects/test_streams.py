"""What is streamed is what is answered whole: generated answers in four dialects, through the real application. The
two answers of a pair come from the engine in chunks of different sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from loraplex.serving.output.formats import REASONING_FORMATS, TOOL_FORMATS, OutputFormats
from support.engine.fake_engine import Reply
from support.http.data_plane import BASE, DataPlane, running_data_plane
from support.http.generated_answers import PATHS, Told, body_for, cuts, generated, read_stream, read_whole

DIALECTS = tuple(PATHS)


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DataPlane]:
    formats = OutputFormats(TOOL_FORMATS["hermes"], REASONING_FORMATS["think_tags"])
    with running_data_plane(tmp_path_factory.mktemp("model"), formats=formats) as running:
        yield running
        running.settle_all()


def compare(plane: DataPlane, dialect: str, seed: int) -> list[Told]:
    case = generated(seed, dialect=dialect)
    headers = {"authorization": "Bearer lpx_acme"}
    url = plane.url + PATHS[dialect]
    body = body_for(dialect, case, BASE)

    def script(name: str) -> None:
        plane.engine.script(
            *(Reply(text=text, cuts=cuts((seed, name, n))) for n, text in enumerate(case.texts))
        )

    script("whole")
    whole = plane.http.post(url, json=body, headers=headers)
    assert whole.status_code == 200, (seed, whole.text)
    script("stream")
    stream = plane.http.post(url, json=body | {"stream": True}, headers=headers)
    assert stream.status_code == 200, (seed, stream.text)
    expected = read_whole(dialect, whole.json())
    found = read_stream(dialect, stream.content.decode(), len(case.texts))
    assert found == expected, f"{dialect}, seed {seed}"
    return expected


def run(plane: DataPlane, dialect: str, count: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(count):
        for told in compare(plane, dialect, seed):
            seen.update({part[0] for part in told.parts if any(part[1:])})
            seen[str(told.reason)] += 1
            seen["logprobs"] += bool(told.logprobs)
            seen["a stop sequence"] += told.reason == "stop_sequence"
    wanted = {"text", "logprobs"} if dialect == "completions" else {"text", "reasoning", "call", "logprobs"}
    if dialect == "messages":
        wanted = (wanted | {"a stop sequence"}) - {"logprobs"}
    assert wanted <= {name for name, number in seen.items() if number}, seen
    print(f"\n{dialect}: {count} answers, {dict(sorted(seen.items()))}")


@pytest.mark.parametrize("dialect", DIALECTS)
def test_streams_equal_whole_answers(speaking: DataPlane, dialect: str) -> None:
    run(speaking, dialect, 40)


@pytest.mark.soak
@pytest.mark.parametrize("dialect", DIALECTS)
def test_streams_equal_whole_answers_long(speaking: DataPlane, dialect: str) -> None:
    run(speaking, dialect, 1000)
