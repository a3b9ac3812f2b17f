"""What goes wrong, as the official OpenAI client sees it over a real socket."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from loraplex.control.errors import NeverFits, RateLimited
from loraplex.control.types import LimitWindow
from support.engine.fake_engine import Reply
from support.http.data_plane import BASE, MAX_MODEL_LEN, DataPlane, Refused

HI: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(params=["chat", "chat stream", "completion", "models"])
def call(request: pytest.FixtureRequest) -> Any:
    def make(client: openai.OpenAI, model: str = BASE) -> Any:
        if request.param == "models":
            return client.models.retrieve(model)
        if request.param == "completion":
            return client.completions.create(model=model, prompt="x")
        return client.chat.completions.create(model=model, messages=HI, stream="stream" in request.param)

    return make


def check(error: openai.APIStatusError, status: int, code: str | None, param: str | None = None) -> None:
    assert error.status_code == status
    assert isinstance(error.body, dict)
    assert set(error.body) == {"message", "type", "param", "code"}
    assert (error.code, error.param) == (code, param)
    assert error.request_id


def test_unknown_key(plane: DataPlane, call: Any) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        call(plane.client("lpx_wrong"))
    check(caught.value, 401, "invalid_api_key")
    assert caught.value.response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("key", ["lpx_usage", "admin"])
def test_key_that_may_not_infer(plane: DataPlane, call: Any, key: str) -> None:
    with pytest.raises(openai.PermissionDeniedError) as caught:
        call(plane.client(key))
    check(caught.value, 403, "insufficient_scope")


def test_model_that_this_key_may_not_use(plane: DataPlane, call: Any) -> None:
    with pytest.raises(openai.PermissionDeniedError) as caught:
        call(plane.client("lpx_json_only"), "pirate")
    check(caught.value, 403, "model_not_allowed", "model")


def test_unknown_model_and_another_tenants_answer_alike(plane: DataPlane, call: Any) -> None:
    answers = []
    for model in ("nothing", "secret"):
        with pytest.raises(openai.NotFoundError) as caught:
            call(plane.client(), model)
        check(caught.value, 404, "model_not_found", "model")
        answers.append(caught.value.body)
    assert answers[0] == answers[1]


def test_rate_limit_is_honoured_by_the_client(plane: DataPlane) -> None:
    plane.limiter.refuse_with = [Refused("rate_limit_exceeded", "slow down", retry_after_s=0.2)]
    with pytest.raises(openai.RateLimitError) as caught:
        plane.client().chat.completions.create(model=BASE, messages=HI)
    check(caught.value, 429, "rate_limit_exceeded")
    assert caught.value.response.headers["retry-after"] == "1"
    plane.limiter.refuse_with = [Refused("rate_limit_exceeded", "slow down", retry_after_s=0.2)]
    answer = plane.client(max_retries=1).chat.completions.create(model=BASE, messages=HI)
    assert answer.choices[0].message.content == "ok"


def test_a_refusal_tells_the_windows(plane: DataPlane) -> None:
    window = LimitWindow(3, 0, 20.0)
    plane.limiter.refuse_with = [RateLimited("slow down", retry_after_s=19.2, windows={"requests": window})]
    with pytest.raises(openai.RateLimitError) as caught:
        plane.client().completions.create(model=BASE, prompt="x")
    headers = caught.value.response.headers
    assert headers["retry-after"] == "20"
    assert caught.value.body["message"] == "slow down Please try again in 20s."  # type: ignore[index]
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert headers["x-ratelimit-reset-requests"] == "20s"
    assert "x-ratelimit-limit-tokens" not in headers


@pytest.mark.parametrize(
    ("limiters", "told"), [("max_tokens", "max_completion_tokens"), ("messages", "messages")]
)
def test_refusal_of_an_impossible_size_names_the_field(plane: DataPlane, limiters: str, told: str) -> None:
    plane.limiter.refuse_with = [NeverFits("too much", param=limiters)]
    with pytest.raises(openai.BadRequestError) as caught:
        plane.client().chat.completions.create(model=BASE, messages=HI, max_completion_tokens=5)
    check(caught.value, 400, "invalid_value", told)


def test_an_answer_survives_a_limiter_that_cannot_settle(plane: DataPlane) -> None:
    plane.limiter.broken = True
    answer = plane.client().chat.completions.create(model=BASE, messages=HI)
    assert answer.choices[0].message.content == "ok"


def test_a_spent_quota_is_not_tried_again(plane: DataPlane) -> None:
    plane.limiter.refuse_with = [Refused("insufficient_quota"), Refused("insufficient_quota")]
    with pytest.raises(openai.RateLimitError) as caught:
        plane.client(max_retries=3).chat.completions.create(model=BASE, messages=HI)
    check(caught.value, 429, "insufficient_quota")
    assert "try again" not in caught.value.message
    assert len(plane.limiter.refuse_with) == 1
    assert "retry-after" not in caught.value.response.headers


def test_limit_windows_are_headers(plane: DataPlane) -> None:
    plane.limiter.windows = (LimitWindow(60, 59, 0.3), LimitWindow(10_000, 9_000, 360.0))
    raw = plane.client().chat.completions.with_raw_response.create(model=BASE, messages=HI)
    found = {name: value for name, value in raw.headers.items() if name.startswith("x-ratelimit")}
    assert found == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "10000",
        "x-ratelimit-remaining-tokens": "9000",
        "x-ratelimit-reset-tokens": "6m0s",
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "code", ["server_overloaded", "adapter_unavailable", "engine_restarting", "draining"]
)
def test_engine_errors_before_the_first_token_are_503(plane: DataPlane, code: Any, stream: bool) -> None:
    plane.engine.script(Reply(error=(code, "not now")))
    with pytest.raises(openai.InternalServerError) as caught:
        plane.client().chat.completions.create(model="pirate", messages=HI, stream=stream)
    check(caught.value, 503, code)
    assert int(caught.value.response.headers["retry-after"]) >= 1


def test_refused_by_the_engine_client(plane: DataPlane) -> None:
    plane.engine.max_inflight = 1  # the second choice does not fit: the first is not sent either
    with pytest.raises(openai.APIStatusError) as caught:
        plane.client().completions.create(model=BASE, prompt="x", n=2)
    check(caught.value, 503, "server_overloaded")
    assert (plane.engine.requests, plane.engine.aborted) == ([], [])


def test_an_engine_that_is_down_and_comes_back(plane: DataPlane) -> None:
    plane.on_loop(plane.engine.kill)
    with pytest.raises(openai.APIStatusError) as caught:
        plane.client().completions.create(model=BASE, prompt="x")
    check(caught.value, 503, "engine_restarting")
    assert plane.http.get(f"{plane.url}/readyz").status_code == 503
    assert plane.http.get(f"{plane.url}/livez").status_code == 200
    plane.on_loop(plane.engine.revive)
    assert plane.client().completions.create(model=BASE, prompt="x").choices[0].text == "ok"
    assert plane.http.get(f"{plane.url}/health").status_code == 200


def test_an_error_after_the_first_byte_is_an_event(plane: DataPlane) -> None:
    plane.engine.script(Reply(text="abc", error=("engine_restarting", "the engine process died")))
    stream = plane.client().chat.completions.create(model=BASE, messages=HI, stream=True)
    seen = ""
    with pytest.raises(openai.APIError) as caught:
        for chunk in stream:
            seen += chunk.choices[0].delta.content or ""
    assert seen == "abc"
    assert caught.value.code == "engine_restarting"


def test_bugs_tell_nothing_of_the_inside(plane: DataPlane, call: Any) -> None:
    plane.authenticator.broken = True
    with pytest.raises(openai.InternalServerError) as caught:
        call(plane.client())
    check(caught.value, 500, "internal_error")
    assert "hunter2" not in caught.value.response.text
    plane.authenticator.broken = False
    plane.engine.script(Reply(error=("internal_error", "hunter2")))
    with pytest.raises(openai.InternalServerError) as caught:
        plane.client().completions.create(model=BASE, prompt="x")
    assert "hunter2" not in caught.value.response.text


def test_too_long_for_the_context(plane: DataPlane) -> None:
    client = plane.client()
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=BASE, prompt="x" * MAX_MODEL_LEN)
    check(caught.value, 400, "context_length_exceeded", "prompt")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=BASE, prompt="xx", max_tokens=MAX_MODEL_LEN - 1)
    check(caught.value, 400, "context_length_exceeded", "max_tokens")
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=BASE, messages=HI, max_completion_tokens=MAX_MODEL_LEN)
    check(caught.value, 400, "context_length_exceeded", "max_completion_tokens")
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=BASE, messages=[{"role": "user", "content": "x" * 400_000}])
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "messages"
    assert plane.limiter.reserved == {}
