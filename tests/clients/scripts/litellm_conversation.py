"""A conversation of LiteLLM with a Loraplex server; see conversation.py for the protocol."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import litellm
from conversation import BASE, KEY, MODEL, URL, as_told, ask, check, refused, timed

QUESTION = "What do you think of the sea?"
STRANGE = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strictness": 1}}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}

litellm.telemetry = False
litellm.suppress_debug_info = True


def options(model: str = MODEL, **more: Any) -> dict[str, Any]:
    """For any of LiteLLM's calls: the server under its `openai/` provider, nothing tried twice."""
    provider = more.pop("provider", "openai")
    return {
        "model": f"{provider}/{model}",
        "api_base": URL,
        "api_key": KEY,
        "max_retries": 0,
        "temperature": 0,
        "max_tokens": 16,
        **more,
    }


def chat(model: str = MODEL, text: str = QUESTION, **more: Any) -> Any:
    messages = more.pop("messages", [{"role": "user", "content": text}])
    return litellm.completion(messages=messages, **options(model, **more))


def told(answer: Any) -> dict[str, Any]:
    choice = answer.choices[0]
    return {
        "text": choice.message.content,
        "finish": choice.finish_reason,
        "prompt": answer.usage.prompt_tokens,
        "completion": answer.usage.completion_tokens,
    }


def collect(chunks: list[Any]) -> dict[str, Any]:
    whole = litellm.stream_chunk_builder(chunks)
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    return told(whole) | {"pieces": len([text for text in texts if text])}


def stream(**more: Any) -> dict[str, Any]:
    return collect(list(chat(stream=True, stream_options={"include_usage": True}, **more)))


async def at_once() -> dict[str, Any]:
    """A whole answer and a streamed one, in flight together."""

    async def streamed() -> dict[str, Any]:
        chunks = await litellm.acompletion(stream=True, stream_options={"include_usage": True}, **request)
        return collect([chunk async for chunk in chunks])

    request = {"messages": [{"role": "user", "content": QUESTION}], **options()}
    whole, other = await asyncio.gather(litellm.acompletion(**request), streamed())
    return {"whole": told(whole), "streamed": other}


def turns() -> dict[str, Any]:
    """The client's own answer goes back in, as it came."""
    parts = [{"type": "text", "text": "What do you "}, {"type": "text", "text": "think?"}]
    first: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    answer = chat(messages=first).choices[0].message
    again = chat(messages=[*first, answer, {"role": "user", "content": "And then?", "name": "ann"}])
    return {"first": answer.content, "second": told(again)["text"]}


def developer() -> str:
    rules = {"role": "developer", "content": "Be brief."}
    return told(chat(messages=[rules, {"role": "user", "content": QUESTION}]))["text"]


def n() -> list[str]:
    return [choice.message.content for choice in chat(n=2, temperature=1.0, seed=7).choices]


def logprobs() -> dict[str, Any]:
    whole = chat(logprobs=True, top_logprobs=2).choices[0].logprobs
    streamed = []
    for chunk in chat(logprobs=True, top_logprobs=2, stream=True):
        found = getattr(chunk.choices[0], "logprobs", None)
        streamed += [] if found is None else found.content
    return {"whole": as_told(whole.content), "streamed": as_told(streamed)}


def echo() -> dict[str, Any]:
    (choice,) = completion(logprobs=1, echo=True).choices
    return {"text": choice.text, "logprobs": choice.logprobs.model_dump()}


def completion(**more: Any) -> Any:
    return litellm.text_completion(prompt="The sea is", **options(provider="text-completion-openai", **more))


def fallbacks() -> str:
    return told(chat("nothing", fallbacks=[{"model": f"openai/{MODEL}", "api_base": URL, "api_key": KEY}]))[
        "text"
    ]


def router() -> str:
    """LiteLLM's own load balancer, over one alias for the server's model."""
    parameters = options()
    models = [{"model_name": "sailor", "litellm_params": parameters}]
    answer = litellm.Router(model_list=models, num_retries=0).completion(
        model="sailor", messages=[{"role": "user", "content": QUESTION}]
    )
    return told(answer)["text"]


def sampling() -> Any:
    chat(
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        seed=7,
        logit_bias={65: -100},
        extra_body={"top_k": 5, "min_p": 0.1},
    )
    return ask("last")


def hang_up() -> Any:
    ask("hold")
    chunks = chat(stream=True)
    text = ""
    while len(text) < 2:
        text += next(chunks).choices[0].delta.content or ""
    chunks.completion_stream.close()
    return {"text": text, "freed": ask("gone")}


def breaks() -> dict[str, Any]:
    ask("break")
    seen = []

    def read() -> None:
        for chunk in chat(stream=True):
            seen.append(chunk.choices[0].delta.content or "")

    return refused(read) | {"seen": "".join(seen)}


def retried(fault: str) -> dict[str, Any]:
    ask(fault)
    return timed(lambda: told(chat(max_retries=1))["text"])


def quota() -> dict[str, Any]:
    ask("quota")
    return refused(lambda: chat(max_retries=3)) | {"refusals_left": ask("refusals")}


def answers() -> None:
    check(
        "models",
        lambda: sorted(
            litellm.get_valid_models(
                check_provider_endpoint=True, custom_llm_provider="openai", api_base=URL, api_key=KEY
            )
        ),
    )
    check("chat", lambda: told(chat()))
    check("stream", stream)
    check("async", lambda: asyncio.run(at_once()))
    check("hosted_vllm", lambda: told(chat(provider="hosted_vllm")))
    check("base", lambda: told(chat(BASE))["text"])
    check("turns", turns)
    check("developer", developer)
    check("completion", lambda: completion().choices[0].text)
    check(
        "completion_stream",
        lambda: "".join(chunk.choices[0].text or "" for chunk in completion(stream=True)),
    )
    check("n", n)
    check("logprobs", logprobs)
    check("echo", echo)
    check("fallbacks", fallbacks)
    check("router", router)
    check("wrong_key", lambda: refused(lambda: chat(api_key="lpx_wrong")))
    check("unknown_model", lambda: refused(lambda: chat("nothing")))
    check("tools", lambda: refused(lambda: chat(tools=[TOOL], tool_choice="auto")))
    check("structured", lambda: refused(lambda: chat(response_format=STRANGE)))
    check("too_long", lambda: refused(lambda: chat(text="x " * 60_000)))
    check("far_too_long", lambda: refused(lambda: chat(text="x " * 600_000)))
    check("answer_too_long", lambda: refused(lambda: chat(max_tokens=100_000)))
    check("embeddings", embedding_length)


def embedding_length() -> str:
    answer = litellm.embedding(
        model=f"openai/{BASE}", input=[QUESTION], api_base=URL, api_key=KEY, max_retries=0
    )
    return f"{math.hypot(*answer.data[0]['embedding']):.4f}"


def faults() -> None:
    check("turns_prompt", lambda: (turns(), ask("last"))[1]["prompt"])
    check("developer_prompt", lambda: (developer(), ask("last"))[1]["prompt"])
    check("sampling", sampling)
    check("length", lambda: told(chat(max_tokens=3)))
    check("max_completion_tokens", lambda: told(chat(max_tokens=None, max_completion_tokens=3)))
    check("stop", lambda: told(chat(stop=["wö"])))
    check("stop_stream", lambda: stream(stop=["wö"]))
    check("rate_limit", lambda: (ask("rate_limit"), refused(chat))[1])
    for fault in ("rate_limit", "drain", "overload", "restart"):
        check(f"{fault}_retried", lambda fault=fault: retried(fault))
    check("quota", quota)
    check("hang_up", hang_up)
    check("breaks", breaks)


answers()
faults()
