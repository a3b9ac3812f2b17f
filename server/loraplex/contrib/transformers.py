"""Push each checkpoint of a PEFT training to a Loraplex server.

    trainer = Trainer(..., callbacks=[PushCallback("support")])

The server's address and the key come from LORAPLEX_URL and LORAPLEX_API_KEY. The key needs the scope `adapters:write`.
This file needs transformers and httpx. It may be copied to a machine where Loraplex is not installed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any
from urllib.parse import quote

import httpx
from transformers import TrainerCallback

FILES = ("adapter_config.json", "adapter_model.safetensors")
CHAT_FILES = (
    "chat_template.jinja",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "additional_chat_templates/tool_use.jinja",
)
"""Sent where a checkpoint has them: how its chats are written, and how its answers end."""
TOKENIZER_NAME, TOKENIZER_BYTES = "tokenizer.json", 16 << 20
"""The tokenizer, which is sent too where it is no larger."""
RETRIED = (408, 429, 502, 503, 504, 507)
"""Statuses after which a push is tried again."""
SERVED_VALUES: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "task_type": (
        *("CAUSAL_LM", "SEQ_2_SEQ_LM", "FEATURE_EXTRACTION", "QUESTION_ANS"),
        *("SEQ_CLS", "TOKEN_CLS"),
    ),
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "orthogonal", "eva", "mica"),
    "modules_to_save": (
        ["qa_outputs"],
        ["score"],
        ["classifier"],
        ["classifier", "score"],
        ["score", "classifier"],
    ),
    "target_parameters": (),
    "enable_lora": (),
    "layer_replication": (),
    "lora_bias": (),
    "megatron_config": (),
    "use_qalora": (),
    "use_bdlora": (),
    "arrow_config": (),
    "kasa_config": (),
}
"""Fields of LoraConfig that no server takes with every value, and the values that it takes beside none (null, false, an
empty list)."""
PATIENCE_S = 15.0
"""Longest time that an absent server is asked again before a training."""

_log = logging.getLogger(__name__)


class PushFailed(Exception):
    """A checkpoint was not served. The message names the checkpoint, the reason and the server's code."""


@dataclass(frozen=True, slots=True)
class PushedCheckpoint:
    """A checkpoint on the server. `seconds`: from the end of its save until it was released (or, without a release,
    until the server answered). `released`: whether it takes the traffic."""

    step: int
    version: str
    digest: str
    seconds: float
    released: bool


class _Checkpoint:
    """The open files of a checkpoint. They can be read after the trainer has deleted the directory."""

    def __init__(self, directory: Path, step: int) -> None:
        self.step = step
        self.saved_at = time.monotonic()
        with contextlib.ExitStack() as stack:
            self.files: dict[str, IO[bytes]] = {
                name: stack.enter_context(open(directory / name, "rb")) for name in FILES
            }
            for name in CHAT_FILES:
                with contextlib.suppress(OSError):
                    self.files[name] = stack.enter_context(open(directory / name, "rb"))
            with contextlib.suppress(OSError):
                tokenizer = stack.enter_context(open(directory / TOKENIZER_NAME, "rb"))
                if os.fstat(tokenizer.fileno()).st_size <= TOKENIZER_BYTES:
                    self.files[TOKENIZER_NAME] = tokenizer
            self._open = stack.pop_all()

    def __enter__(self) -> _Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()


class PushCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Pushes each checkpoint as the next version of `name`, and gives it all the traffic of the name.

    The training does not begin where the server cannot be reached, the key is not valid or may not push, or the server
    serves another base: PushFailed says why. A thread pushes, so training goes on meanwhile. Of the checkpoints that
    wait for it, only the newest is kept. A push is repeated while the server is busy or cannot be reached, for up to
    `timeout_s` seconds. A checkpoint that is refused is logged, and training goes on; with `strict` the next save, or
    the end of the training, raises PushFailed. The end of the training waits for the last push. Only the process of
    rank 0 pushes.

    `pushed` and `failures` list what came of each checkpoint that was sent.
    """

    def __init__(
        self,
        name: str,
        *,
        tenant: str | None = None,
        url: str | None = None,
        api_key: str | None = None,
        release: bool = True,
        subfolder: str = "",
        timeout_s: float = 300.0,
        strict: bool = False,
    ) -> None:
        """`tenant`: the key's own if it is not given. `url`: the server's data port, or its admin port. `release`:
        whether the new version takes all the traffic of the name at once; otherwise it waits for `loraplex release`.
        `subfolder`: where in a checkpoint PEFT saves the adapter, if it is not called "default". Raises ValueError
        where no key is given."""
        super().__init__()
        self._name = name
        self._release = release
        self._subfolder = subfolder
        self._timeout_s = timeout_s
        self._strict = strict
        api_key = api_key or os.environ.get("LORAPLEX_API_KEY", "")
        if not api_key:
            raise ValueError("PushCallback needs a key: set LORAPLEX_API_KEY or give api_key")
        base_url = (url or os.environ.get("LORAPLEX_URL", "http://127.0.0.1:8000")).rstrip("/")
        self._client = httpx.Client(
            base_url=base_url, headers={"authorization": f"Bearer {api_key}"}, timeout=60.0
        )
        self._tenant = tenant
        self.pushed: list[PushedCheckpoint] = []
        self.failures: list[PushFailed] = []
        self._raised = 0
        self._changed = threading.Condition()
        self._waiting: _Checkpoint | None = None
        self._busy = False
        self._thread: threading.Thread | None = None

        if not _log.hasHandlers():
            # Python shows warnings alone where a training sets up no logging.
            _log.addHandler(logging.StreamHandler())
            _log.setLevel(logging.INFO)

    # What the trainer calls.

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        end = time.monotonic() + min(PATIENCE_S, self._timeout_s)
        caller = self._ask(end)
        base = caller["base"]
        if reason := _obstacle(caller, self._tenant) or _misfit(kwargs.get("model"), base):
            raise PushFailed(f"checkpoints cannot be pushed to {self._client.base_url}: {reason}")
        self._tenant = self._tenant or caller["tenant"]
        _log.info(
            "checkpoints are pushed as '%s' of tenant '%s' to %s, which serves %s",
            self._name,
            self._tenant,
            self._client.base_url,
            base["name"],
        )

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        self._raise_failures()
        directory = Path(args.output_dir) / f"checkpoint-{state.global_step}" / self._subfolder
        try:
            checkpoint = _Checkpoint(directory, state.global_step)
        except OSError as error:
            hint = "is the model a PEFT model?"
            if (directory / "adapter_model.bin").exists():
                hint = (
                    "adapter_model.bin is a pickle, which no server takes: train with save_safetensors=True"
                )
            self._fail(state.global_step, f"{error.filename}: {error.strerror}; {hint}")
            return
        with self._changed:
            if self._waiting is not None:
                _log.info("the checkpoint of step %d is not pushed: a newer one is there", self._waiting.step)
                self._waiting.__exit__(None, None, None)
            self._waiting = checkpoint
            if not self._busy:
                self._busy = True
                self._thread = threading.Thread(target=self._push_all, name="loraplex-push", daemon=True)
                self._thread.start()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.wait()
        self._raise_failures()

    def wait(self) -> None:
        """Until nothing is left to push."""
        with self._changed:
            self._changed.wait_for(lambda: not self._busy)

    def _raise_failures(self) -> None:
        if self._strict and len(self.failures) > self._raised:
            self._raised = len(self.failures)
            raise self.failures[-1]

    # The thread.

    def _push_all(self) -> None:
        while True:
            with self._changed:
                checkpoint, self._waiting = self._waiting, None
                if checkpoint is None:
                    self._busy = False
                    self._changed.notify_all()
                    return
            with checkpoint:
                try:
                    self._push(checkpoint)
                except PushFailed as error:
                    self._fail(checkpoint.step, str(error))
                except Exception as error:  # the training must not wait for a thread that has ended
                    self._fail(checkpoint.step, f"{type(error).__name__}: {error}")

    def _fail(self, step: int, reason: str) -> None:
        failure = PushFailed(f"the checkpoint of step {step} was not pushed to '{self._name}': {reason}")
        self.failures.append(failure)
        _log.warning("%s", failure)

    def _push(self, checkpoint: _Checkpoint) -> None:
        end = time.monotonic() + self._timeout_s
        if self._tenant is None:  # a loop of one's own need not call on_train_begin
            self._tenant = str(self._ask(end)["tenant"])
        adapter = f"/admin/v1/tenants/{quote(self._tenant, safe='')}/adapters/{quote(self._name, safe='')}"
        made = self._send(end, f"{adapter}/versions", checkpoint).json()
        version, digest = made["version"], made["digest"]
        if self._release:
            self._send(end, f"{adapter}/release/promote", None, {"version": version})
        seconds = time.monotonic() - checkpoint.saved_at
        self.pushed.append(PushedCheckpoint(checkpoint.step, version, digest, seconds, self._release))
        _log.info(
            "step %d is '%s@%s' (%s), %s, %.2f s after its save",
            checkpoint.step,
            self._name,
            version,
            digest[:19],
            "released" if self._release else f"not released: loraplex release promote {self._name} {version}",
            seconds,
        )

    def _ask(self, end: float) -> dict[str, Any]:
        """Whose the key is, and the server's base. Raises PushFailed."""
        where = self._client.base_url
        while True:
            try:
                answer = self._client.get("/admin/v1/caller")
            except httpx.HTTPError as error:
                reason = (
                    f"{where} cannot be reached ({error}): is LORAPLEX_URL, or url, the server's address?"
                )
            else:
                if answer.is_success:
                    try:
                        found: dict[str, Any] = answer.json()
                        return {name: found[name] for name in ("kind", "tenant", "key", "base")}
                    except (ValueError, KeyError, TypeError):
                        raise PushFailed(
                            f"{where} is no Loraplex server: its answer is another one's"
                        ) from None
                reason = _reason(answer)
                if answer.status_code == 401:
                    raise PushFailed(f"{where} refuses the key of LORAPLEX_API_KEY, or api_key: {reason}")
                if answer.status_code not in RETRIED:
                    raise PushFailed(
                        f"{where} does not say whose the key is, is it a Loraplex server? {reason}"
                    )
            if time.monotonic() + 1 > end:
                raise PushFailed(reason)
            time.sleep(1)

    def _send(
        self, end: float, path: str, checkpoint: _Checkpoint | None, body: dict[str, str] | None = None
    ) -> httpx.Response:
        """Post until the server accepts it. Raises PushFailed for a refusal, and at `end`."""
        while True:
            delay = 1.0
            try:
                if checkpoint is None:
                    answer = self._client.post(path, json=body)
                else:
                    for file in checkpoint.files.values():
                        file.seek(0)
                    parts = {name: (name, file) for name, file in checkpoint.files.items()}
                    answer = self._client.post(path, files=parts)
            except httpx.TransportError as error:
                reason = f"{self._client.base_url} cannot be reached: {error}"
            else:
                if answer.is_success:
                    return answer
                reason = _reason(answer)
                if answer.status_code not in RETRIED:
                    raise PushFailed(reason)
                delay = _retry_after_s(answer, delay)
            if time.monotonic() + delay > end:
                raise PushFailed(f"{reason} (tried for {self._timeout_s:g} s)")
            time.sleep(delay)


def _obstacle(caller: dict[str, Any], tenant: str | None) -> str | None:
    """Why this key may not push for this tenant."""
    key = caller["key"]
    if key is None:
        return None if tenant is not None else "an admin token is no tenant's: give tenant"
    if tenant not in (None, caller["tenant"]):
        return f"the key is of the tenant '{caller['tenant']}', not '{tenant}'"
    if "adapters:write" not in key["scopes"]:
        return f"the key {key['id']} lacks the scope adapters:write"
    return None


def _misfit(model: Any, base: dict[str, Any]) -> str | None:
    """Why an adapter of this model would be refused, as far as its config tells."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    ours = [getattr(config, name, None) for name in ("num_hidden_layers", "hidden_size")]
    theirs = [base["num_layers"], base["hidden_size"]]
    if any(None not in pair and pair[0] != pair[1] for pair in zip(ours, theirs, strict=True)):
        return (
            f"the model has {ours[0]} layers of width {ours[1]}, and the server's base '{base['name']}' has "
            f"{theirs[0]} of {theirs[1]}: train on the model that is served"
        )
    configs = getattr(model, "peft_config", None)
    adapters = list(configs.values()) if isinstance(configs, dict) else []
    rows = getattr(config, "vocab_size", None)
    if rows is not None and base.get("vocab_size") not in (None, rows):
        return (
            f"the model has {rows} rows of embeddings, and the server's base '{base['name']}' has "
            f"{base['vocab_size']}: its vocabulary was resized for the training, as TRL's chat_template_path and added "
            "tokens do; train with the tokens that the served base has"
        )
    for found in adapters:
        for name, served in SERVED_VALUES.items():
            value = getattr(found, name, None)
            if value and value not in served:
                value = getattr(value, "value", value)  # of an enumeration
                written = json.dumps(value, default=str)
                return f"{name} = {written} is not served, and each checkpoint would be refused: train without it"
    ranks = [getattr(found, "r", 0) for found in adapters]
    if ranks and max(ranks) > base["max_adapter_rank"]:
        return f"rank {max(ranks)} is above the server's {base['max_adapter_rank']} (--max-adapter-rank)"
    return None


def _reason(answer: httpx.Response) -> str:
    """The server's own words, and its code."""
    try:
        problem = answer.json()
        return f"{answer.status_code} {problem['code']}: {problem.get('detail') or problem.get('title')}"
    except (ValueError, KeyError, TypeError):
        return f"the server answered {answer.status_code}"


def _retry_after_s(answer: httpx.Response, default: float) -> float:
    try:
        return max(0.1, float(answer.headers["retry-after"]))
    except (KeyError, ValueError):
        return default
