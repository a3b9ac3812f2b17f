"""The example of an activated LoRA over the real model: its verdicts, on the KV that the base has computed."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from support.engine.local_engine import LocalEngine

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_torch_thread")]

JUDGE = Path(__file__).parents[3] / "examples" / "judge-adapter"
ANSWERS = {
    "polite": "I am happy to help. Yeast makes gas, and gas makes room. Take your time.",
    "rude": "Why do you waste my time? Yeast makes gas, and gas makes room. Go away.",
    "neutral": "Yeast makes gas, and gas makes room.",
}


def test_the_judge_says_how_an_answer_is(real_model_dir: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(real_model_dir / "tokenizer.json"))
    engine = LocalEngine(
        real_model_dir, tmp_path, max_num_seqs=4, max_model_len=256, kv_cache_memory=64 << 20,
        adapter_memory=8 << 20, adapter_cpu_memory=8 << 20,
    )  # fmt: skip
    try:
        judge = engine.publish(JUDGE)
        for wanted, answer in ANSWERS.items():
            said = f"<|im_start|>user\nWhy does bread rise?<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
            conversation = tokenizer.encode(f"{said}<|im_start|>assistant\n").ids
            engine.add(f"base {wanted}", conversation, max_tokens=1)
            engine.run()
            hits = engine.core.stats().prefix_cache_hits
            engine.add(wanted, [*conversation, *judge.invocation], judge, max_tokens=4, ignore_eos=False)
            engine.run()
            assert tokenizer.decode(engine.tokens(wanted)) == wanted
            # Of 16 tokens each; the block of the invocation is the adapter's.
            assert engine.core.stats().prefix_cache_hits - hits == len(conversation) // 16 * 16
    finally:
        engine.close()
