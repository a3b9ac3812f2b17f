"""Push the adapter of a PEFT training to a series of a Loraplex server after each step, from memory.

    trainer = GRPOTrainer(..., callbacks=[SeriesCallback("policy", agree_on=[tokenizer.encode("a text of the task")])])

The server's address and the key come from LORAPLEX_URL and LORAPLEX_API_KEY. The key needs the scope `adapters:train`,
and `adapters:write` too where the callback is to set the rules of the series. This file needs transformers, PEFT and
httpx. It may be copied to a machine where Loraplex is not installed.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import torch
from transformers import TrainerCallback

RETRIED = (408, 429, 502, 503, 504, 507)
"""Statuses after which a call is tried again."""
OF_THRESHOLD = ("agreement_missing", "conflict agree_within")
"""Refusals of a push that lacks the log probabilities, and of one that has them where the series has no threshold."""
FIGURES = ("mean", "max", "bias", "kl")
"""Figures of the server's agreement report that are logged."""

_log = logging.getLogger(__name__)


class SeriesFailed(Exception):
    """A step could not be served. The message has the step, the server's code and its reason."""


@dataclass(frozen=True, slots=True)
class PushedStep:
    """A step on the server. `seconds`: from the end of the step until it was served. `agreement`: figures of the
    server's report by name, in nats; empty without `agree_on`."""

    step: int
    version: str
    digest: str
    seconds: float
    agreement: Mapping[str, float]


class SeriesCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Pushes the adapter as a new version of the series `name` after every `every`-th optimizer step. The training goes
    on when the version serves, so that what is sampled next comes from it. A step that changed nothing (LoRA's B is 0)
    is not served, and logged. Any other refusal ends the training with SeriesFailed, as does a server that is away for
    `timeout_s` seconds. Only the process of rank 0 pushes.

    `pushed` lists what was served."""

    def __init__(
        self,
        name: str,
        *,
        every: int = 1,
        agree_on: Sequence[Sequence[int]] = (),
        rules: Mapping[str, Any] | None = None,
        tenant: str | None = None,
        url: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        """`agree_on`: token ids of sequences (16 at most, 8,192 tokens together), whose log probabilities the model and
        the server are to give alike after each push, and before it serves where the series has `agree_within`.
        `rules`: those of the series, such as {"keep_last": 4}; they are set at the start, with the config of the
        trained adapter. None: the series is there. `tenant`: the key's own if it is not given. `url`: the server's data
        port. Raises ValueError where no key is given, or `rules` have agree_within and `agree_on` is empty."""
        super().__init__()
        api_key = api_key or os.environ.get("LORAPLEX_API_KEY", "")
        if not api_key:
            raise ValueError("SeriesCallback needs a key: set LORAPLEX_API_KEY or give api_key")
        is_held = bool(rules and rules.get("agree_within"))
        if is_held and not agree_on:
            raise ValueError(
                "the rules have agree_within, and agree_on names no tokens to hold each push to: give "
                "agree_on=[tokenizer.encode('a text of the task')], or leave agree_within out"
            )
        self._name = name
        self._every = every
        self._agree_on = [list(ids) for ids in agree_on]
        self._rules = rules
        self._is_held = is_held
        self._tenant = tenant
        self._timeout_s = timeout_s
        base_url = (url or os.environ.get("LORAPLEX_URL", "http://127.0.0.1:8000")).rstrip("/")
        self._client = httpx.Client(
            base_url=base_url, headers={"authorization": f"Bearer {api_key}"}, timeout=60.0
        )
        self.pushed: list[PushedStep] = []
        if not _log.hasHandlers():
            # Python shows warnings alone where a training sets up no logging.
            _log.addHandler(logging.StreamHandler())
            _log.setLevel(logging.INFO)

    # What the trainer calls.

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        if self._tenant is None:
            self._tenant = self._call("GET", "/admin/v1/caller", 0).json()["tenant"]
        if self._rules is not None:
            rules = {**self._rules, "config": _config_of(kwargs["model"])}
            self._call("PUT", f"{self._adapter}/series", 0, json=rules)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and state.global_step % self._every == 0:
            self._push(kwargs["model"], state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the newest push to the trainer's own log."""
        if state.is_world_process_zero and self.pushed and state.log_history:
            last = self.pushed[-1]
            told = {f"loraplex/agreement_{name}": value for name, value in last.agreement.items()}
            state.log_history[-1] |= told | {
                "loraplex/version": last.version,
                "loraplex/push_s": last.seconds,
            }

    @property
    def _adapter(self) -> str:
        return f"/admin/v1/tenants/{quote(self._tenant or '', safe='')}/adapters/{quote(self._name, safe='')}"

    def _push(self, model: Any, step: int) -> None:
        began = time.monotonic()
        answer = self._send(model, step, ("no_effect", *(OF_THRESHOLD if self._agree_on else ())))
        if not answer.is_success and _reason(answer)[0] in OF_THRESHOLD:
            # The threshold was set, or taken away, elsewhere.
            self._is_held = not self._is_held
            answer = self._send(model, step, ("no_effect",))
        if not answer.is_success:
            _log.info("step %d is not served: it changed nothing yet", step)
            return
        seconds, made = time.monotonic() - began, answer.json()
        if self._is_held:
            found = made["report"]["agreement"]
            agreement = {name: float(found[name]) for name in FIGURES}
        else:
            agreement = self._compare(model, step, made["version"]) if self._agree_on else {}
        self.pushed.append(PushedStep(step, made["version"], made["digest"], seconds, agreement))
        _log.info(
            "step %d is '%s@%s' (%s), %.3f s after it%s",
            step,
            self._name,
            made["version"],
            made["digest"][:19],
            seconds,
            "".join(f", {name} {agreement[name]:.2e}" for name in FIGURES if name in agreement),
        )

    def _send(self, model: Any, step: int, allowed: Sequence[str]) -> httpx.Response:
        """Push the adapter, with its log probabilities where the series holds it to them. The answer is a success, or a
        refusal with one of the `allowed` codes."""
        path, tensors = f"{self._adapter}/series/versions", _tensors_of(model)
        if self._is_held:
            numbers = {"tokens": self._agree_on, "logprobs": logprobs_of(model, self._agree_on)}
            form = {
                "adapter_model.safetensors": ("adapter_model.safetensors", tensors),
                "agreement": (None, json.dumps(numbers).encode(), "application/json"),
            }
            return self._call("POST", path, step, files=form, allowed=allowed)
        headers = {"content-type": "application/octet-stream"}
        return self._call("POST", path, step, content=tensors, headers=headers, allowed=allowed)

    def _compare(self, model: Any, step: int, version: str) -> dict[str, float]:
        body = {"tokens": self._agree_on, "logprobs": logprobs_of(model, self._agree_on)}
        found = self._call("POST", f"{self._adapter}/versions/{version}/agreement", step, json=body).json()
        return {name: float(found[name]) for name in FIGURES}

    def _call(
        self, method: str, path: str, step: int, *, allowed: Sequence[str] = (), **sent: Any
    ) -> httpx.Response:
        """The answer, once it is a success or a refusal with one of the `allowed` codes. Raises SeriesFailed for any
        other refusal, and when `timeout_s` is over."""
        end = time.monotonic() + self._timeout_s
        while True:
            delay = 0.5
            try:
                answer = self._client.request(method, path, **sent)
            except httpx.TransportError as error:
                reason = f"{self._client.base_url} cannot be reached: {error}"
            else:
                if answer.is_success:
                    return answer
                code, reason = _reason(answer)
                if code in allowed:
                    return answer
                if answer.status_code not in RETRIED:
                    raise SeriesFailed(f"step {step} of '{self._name}': {reason}")
                delay = _retry_after_s(answer, delay)
            if time.monotonic() + delay > end:
                raise SeriesFailed(
                    f"step {step} of '{self._name}': {reason} (tried for {self._timeout_s:g} s)"
                )
            time.sleep(delay)


def logprobs_of(model: Any, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """The model's natural log probability of each token from the second on, without dropout and in float32 from the
    logits on. One forward pass a sequence. The model is left in the mode that it was in."""
    training = model.training
    model.eval()
    try:
        found = []
        with torch.no_grad():
            for ids in sequences:
                given = torch.tensor([list(ids)], device=model.device)
                rows = model(input_ids=given).logits[0, :-1].float().log_softmax(-1)
                found.append(rows.gather(1, given[0, 1:, None])[:, 0].tolist())
        return found
    finally:
        model.train(training)


def _tensors_of(model: Any) -> bytes:
    """The bytes of an adapter_model.safetensors, as PEFT would save it."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save

    tensors = get_peft_model_state_dict(model, adapter_name=model.active_adapter)
    return bytes(save({name: value.detach().cpu().contiguous() for name, value in tensors.items()}))


def _config_of(model: Any) -> dict[str, Any]:
    """The adapter_config.json that PEFT would save."""
    with tempfile.TemporaryDirectory() as folder:
        model.peft_config[model.active_adapter].save_pretrained(folder)
        found: dict[str, Any] = json.loads((Path(folder) / "adapter_config.json").read_bytes())
        return found


def _reason(answer: httpx.Response) -> tuple[str, str]:
    """The server's code, with the field at fault where that is a conflict, and its words."""
    try:
        problem = answer.json()
        code = problem["code"]
        if code == "conflict":
            code += f" {problem.get('param')}"
        return code, f"{answer.status_code} {problem['code']}: {problem['detail']}"
    except (ValueError, KeyError, TypeError):
        return "", f"the server answered {answer.status_code}"


def _retry_after_s(answer: httpx.Response, default: float) -> float:
    try:
        return max(0.1, float(answer.headers["retry-after"]))
    except (KeyError, ValueError):
        return default
