#!/usr/bin/env bash
# Believed: without an image, transformers' multimodal Gemma 4 class computes of token ids what the text class computes with the same weights.
# So is: `Gemma4ForConditionalGeneration` replaces the ids of image, video and audio placeholders by the padding token before it looks up the
# embedding and the inputs by layer, whether there are pixels or not; `Gemma4ForCausalLM` looks up the placeholder's own rows. A text that
# names such an id, or a model that samples one, goes on differently by class: the logits of that place and of all behind it differ. Texts
# without such an id are equal. Compare and evaluate with the class that serves, and ban the placeholders' ids in sampling.
# Seen: transformers 5.23.0, torch 2.13.0, 2026-11-29:
#   no placeholder: logits differ by 0.000
#   a placeholder: logits before it differ by 0.000, from it on by up to 8.098
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" --quiet --disable-pip-version-check install torch==2.13.0 transformers==5.23.0 2>/dev/null
cat >"$place/classes.py" <<'PY'
import torch
from transformers import Gemma4Config, Gemma4ForCausalLM, Gemma4ForConditionalGeneration

IMAGE = 60
text = {
    "vocab_size": 64, "vocab_size_per_layer_input": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16, "hidden_size_per_layer_input": 8,
    "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16, "pad_token_id": 0,
}
config = Gemma4Config(text_config=text, image_token_id=IMAGE, video_token_id=61, audio_token_id=62, boi_token_id=58, eoi_token_id=59)
torch.manual_seed(0)
whole = Gemma4ForConditionalGeneration(config).eval()
for weight in whole.parameters():
    if weight.dim() > 1:
        torch.nn.init.normal_(weight, std=0.3)
alone = Gemma4ForCausalLM(config.text_config).eval()
alone.model.load_state_dict(whole.model.language_model.state_dict())


def difference(ids: list[int]) -> torch.Tensor:
    """The largest one of the logits at each position."""
    with torch.no_grad():
        first, second = (model(input_ids=torch.tensor([ids])).logits[0] for model in (whole, alone))
    return (first - second).abs().amax(-1)


plain, named = difference([2, 5, 9, 11, 7]), difference([2, 5, IMAGE, 11, 7])
print(f"no placeholder: logits differ by {plain.max():.3f}")
print(f"a placeholder: logits before it differ by {named[:2].max():.3f}, from it on by up to {named[2:].max():.3f}")
if plain.max() > 1e-4 or named[:2].max() > 1e-4 or named[2:].max() < 1e-2:
    raise SystemExit("the two classes behave otherwise than noted")
PY
"$place/venv/bin/python" "$place/classes.py"
