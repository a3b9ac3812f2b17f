"""A training with PEFT that saves a checkpoint every few seconds and pushes it to a server, unless it is told not to.

    PYTHONPATH=tests python -m bench.adapters.pushing_trainer MODEL WORK --url URL --key KEY [--every 10] [--nice 10]

Trains LoRA of rank 8 on q_proj and v_proj of MODEL, on random tokens, with one thread of niceness `--nice`, until
WORK/stop exists. While WORK/hold exists, checkpoints are saved and not pushed. Prints a line of JSON for each save and
each push, with times of time.monotonic, which all processes of a machine share. `bench.adapters.training_pushes` starts
it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PrinterCallback, Trainer, TrainingArguments

from loraplex.contrib.transformers import PushCallback, PushedCheckpoint

TENANT, NAME = "trainer", "run"
TOKENS = 32
"""Of a training step."""


class _Printed(list[PushedCheckpoint]):
    """Pushed checkpoints, each printed when it is added."""

    def append(self, pushed: PushedCheckpoint) -> None:
        super().append(pushed)
        now = time.monotonic()
        _tell(
            event="pushed", version=pushed.version, digest=pushed.digest, saved=now - pushed.seconds, at=now
        )


class TimedPushes(PushCallback):
    """Saves every `every` seconds of time, ends the training on request, and pushes unless WORK/hold exists."""

    def __init__(self, work: Path, every: float, **options: Any) -> None:
        super().__init__(NAME, tenant=TENANT, strict=True, **options)
        self._work, self._every = work, every
        self._saved = time.monotonic()
        self.pushed = _Printed()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (self._work / "stop").exists():
            control.should_training_stop = True
        elif time.monotonic() - self._saved >= self._every:
            self._saved = time.monotonic()
            control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        held = (self._work / "hold").exists()
        _tell(event="saved", step=state.global_step, held=held, at=time.monotonic())
        if not held:
            super().on_save(args, state, control, **kwargs)


def _tell(**fields: object) -> None:
    # One write of a whole line: the training's thread and the push's thread both print.
    sys.stdout.buffer.write(json.dumps(fields).encode() + b"\n")
    sys.stdout.buffer.flush()


def be_nice(niceness: int) -> None:
    """Let other processes go first."""
    os.nice(niceness)
    # Where Linux groups processes by session, niceness counts within the session alone.
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(niceness))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--url", required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--every", type=float, default=10.0)
    parser.add_argument("--nice", type=int, default=10)
    options = parser.parse_args()
    be_nice(options.nice)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    tokens = torch.randint(0, base.config.vocab_size, (64, TOKENS))
    trainer = Trainer(
        model=get_peft_model(base, config),
        args=TrainingArguments(
            output_dir=str(options.work / "checkpoints"),
            max_steps=1_000_000,
            save_strategy="no",
            per_device_train_batch_size=1,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            logging_strategy="no",
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[TimedPushes(options.work, options.every, url=options.url, api_key=options.key)],
    )
    trainer.remove_callback(PrinterCallback)  # it would print as well
    trainer.train()


if __name__ == "__main__":
    main()
