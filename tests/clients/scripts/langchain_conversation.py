"""A conversation of langchain-openai with a Loraplex server; see conversation.py for the protocol."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from conversation import BASE, KEY, MODEL, URL, as_told, ask, check, refused, timed
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

STRANGE = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strictness": 1}}
QUESTION = "What do you think of the sea?"


class Weather(BaseModel):
    """What the weather is like in a city."""

    city: str
    degrees: int


def chat(model: str = MODEL, **options: Any) -> ChatOpenAI:
    options = {"api_key": KEY, "max_retries": 0, "temperature": 0, "max_tokens": 16, **options}
    return ChatOpenAI(model=model, base_url=URL, **options)


def told(message: BaseMessage) -> dict[str, Any]:
    """What an answer says, with the token counts in langchain's own names."""
    usage = getattr(message, "usage_metadata", None) or {}
    return {
        "text": message.content,
        "finish": message.response_metadata.get("finish_reason"),
        "prompt": usage.get("input_tokens"),
        "completion": usage.get("output_tokens"),
    }


def stream(**options: Any) -> dict[str, Any]:
    whole, pieces = None, 0
    for chunk in chat(stream_usage=True, **options).stream(QUESTION):
        pieces += bool(chunk.content)
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    return told(whole) | {"pieces": pieces}


async def at_once() -> dict[str, Any]:
    """A whole answer, a streamed one and two of a batch, all in flight together."""

    async def streamed() -> BaseMessage:
        whole = None
        async for chunk in chat(stream_usage=True).astream(QUESTION):
            whole = chunk if whole is None else whole + chunk
        assert whole is not None
        return whole

    batch = chat().abatch([QUESTION, QUESTION])
    one, other, many = await asyncio.gather(chat().ainvoke(QUESTION), streamed(), batch)
    return {
        "whole": told(one),
        "streamed": told(other),
        "batch": [told(answer)["text"] for answer in many],
    }


def turns() -> dict[str, Any]:
    """The client's own answer goes back in, as it came."""
    first = [
        SystemMessage("Be brief."),
        HumanMessage([{"type": "text", "text": "What do you "}, {"type": "text", "text": "think?"}]),
    ]
    answer = chat().invoke(first)
    again = chat().invoke([*first, answer, HumanMessage("And then?", name="ann")])
    return {"first": told(answer)["text"], "second": told(again)["text"]}


def developer() -> str:
    rules = SystemMessage("Be brief.", additional_kwargs={"__openai_role__": "developer"})
    return told(chat().invoke([rules, HumanMessage(QUESTION)]))["text"]


def n() -> list[str]:
    result = chat(n=2, temperature=1.0, seed=7).generate([[HumanMessage(QUESTION)]])
    return [generation.text for generation in result.generations[0]]


def logprobs() -> dict[str, Any]:
    asked, streamed = chat(logprobs=True, top_logprobs=2), None
    whole = asked.invoke(QUESTION)
    for chunk in asked.stream(QUESTION):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None
    answers = {"whole": whole, "streamed": streamed}
    return {how: as_told(answer.response_metadata["logprobs"]["content"]) for how, answer in answers.items()}


def echo() -> dict[str, Any]:
    asked = completion(logprobs=1, model_kwargs={"echo": True})
    answer = asked.generate(["The sea is"]).generations[0][0]
    assert answer.generation_info is not None
    return {"text": answer.text, "logprobs": answer.generation_info["logprobs"]}


def completion(**options: Any) -> OpenAI:
    options = {"max_tokens": 16, "max_retries": 0, **options}
    return OpenAI(model=MODEL, base_url=URL, api_key=KEY, temperature=0, **options)


def fallbacks() -> str:
    return str(chat("nothing").with_fallbacks([chat()]).invoke(QUESTION).content)


def tools() -> Any:
    return chat().bind_tools([Weather]).invoke(QUESTION)


def tool_history() -> Any:
    calls = [{"name": "Weather", "args": {"city": "Bonn"}, "id": "call-1"}]
    history = [
        HumanMessage(QUESTION),
        AIMessage("", tool_calls=calls),
        ToolMessage("12", tool_call_id="call-1"),
    ]
    return chat().invoke(history)


def structured() -> Any:
    return chat().with_structured_output(Weather, method="function_calling").invoke(QUESTION)


def sampling() -> Any:
    chat(
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        seed=7,
        logit_bias={65: -100},
        extra_body={"top_k": 5, "min_p": 0.1},
    ).invoke(QUESTION)
    return ask("last")


def hang_up() -> Any:
    ask("hold")
    running = chat().stream(QUESTION)
    text = ""
    while len(text) < 2:
        text += str(next(running).content)
    running.close()
    return {"text": text, "freed": ask("gone")}


def breaks() -> dict[str, Any]:
    ask("break")
    seen = []

    def read() -> None:
        seen.extend(str(chunk.content) for chunk in chat().stream(QUESTION))

    return refused(read) | {"seen": "".join(seen)}


def retried(fault: str) -> dict[str, Any]:
    ask(fault)
    return timed(lambda: chat(max_retries=1).invoke(QUESTION).content)


def quota() -> dict[str, Any]:
    ask("quota")
    return refused(lambda: chat(max_retries=3).invoke(QUESTION)) | {"refusals_left": ask("refusals")}


def too_long(text: str) -> dict[str, Any]:
    return refused(lambda: chat(max_tokens=None).invoke(text))


def answers() -> None:
    check("chat", lambda: told(chat().invoke(QUESTION)))
    check("stream", stream)
    check("batch", lambda: [told(answer)["text"] for answer in chat().batch([QUESTION] * 3)])
    check("async", lambda: asyncio.run(at_once()))
    check("base", lambda: told(chat(BASE).invoke(QUESTION))["text"])
    check("turns", turns)
    check("developer", developer)
    check("completion", lambda: completion().invoke("The sea is"))
    check("completion_stream", lambda: "".join(completion().stream("The sea is")))
    check("n", n)
    check("logprobs", logprobs)
    check("echo", echo)
    check("fallbacks", fallbacks)
    check("wrong_key", lambda: refused(lambda: chat(api_key="lpx_wrong").invoke(QUESTION)))
    check("unknown_model", lambda: refused(lambda: chat("nothing").invoke(QUESTION)))
    check("tools", lambda: refused(tools))
    check("tool_history", lambda: tool_history().content)
    check("structured_function_calling", lambda: refused(structured))
    check("structured", lambda: refused(lambda: chat().bind(response_format=STRANGE).invoke(QUESTION)))
    check("too_long", lambda: too_long("x " * 60_000))
    check("far_too_long", lambda: too_long("x " * 600_000))
    check("answer_too_long", lambda: refused(lambda: chat(max_tokens=100_000).invoke(QUESTION)))
    embeddings = OpenAIEmbeddings(
        model=BASE, base_url=URL, api_key=KEY, max_retries=0, check_embedding_ctx_length=False
    )
    check("embeddings", lambda: f"{math.hypot(*embeddings.embed_query(QUESTION)):.4f}")
    check("responses", lambda: chat(use_responses_api=True).invoke(QUESTION).text)


def faults() -> None:
    check("turns_prompt", lambda: (turns(), ask("last"))[1]["prompt"])
    check("developer_prompt", lambda: (developer(), ask("last"))[1]["prompt"])
    check("sampling", sampling)
    check("length", lambda: told(chat(max_tokens=3).invoke(QUESTION)))
    check("stop", lambda: told(chat(stop=["wö"]).invoke(QUESTION)))
    check("stop_stream", lambda: stream(stop=["wö"]))
    check(
        "num_tokens", lambda: chat(custom_get_token_ids=lambda text: list(text.encode())).get_num_tokens("wö")
    )
    check("rate_limit", lambda: (ask("rate_limit"), refused(lambda: chat().invoke(QUESTION)))[1])
    for fault in ("rate_limit", "drain", "overload", "restart"):
        check(f"{fault}_retried", lambda fault=fault: retried(fault))
    check("quota", quota)
    check("hang_up", hang_up)
    check("breaks", breaks)


answers()
faults()
