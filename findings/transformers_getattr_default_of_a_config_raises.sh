#!/usr/bin/env bash
# Believed: a field of a config of transformers can be read with `getattr(config, name, None)`, or looked for with `hasattr`: at worst
#   there is no such field.
# So is: both raise a RuntimeError where layers differ in that field (`per_layer_config`): neither takes an error that is no
#   AttributeError for "not there". Gemma 4's default config is of this kind, by head_dim, which every server sizes its cache by; the
#   field its released files set, `global_head_dim`, is not on the config that was made of them. `to_dict()` answers with one of the sizes.
# Versions: transformers 5.23.0 (no torch needed). Seen 2026-11-29:
#   getattr: AmbiguousGlobalPerLayerAttributeError, AttributeError: False
#   hasattr: AmbiguousGlobalPerLayerAttributeError, AttributeError: False
#   to_dict: 256, a sliding layer 256, a full layer 512, global_head_dim there: False
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check "transformers==5.23.0" 2>/dev/null
cat > "$work/probe.py" <<'PY'
import sys

from transformers import Gemma4TextConfig

config = Gemma4TextConfig(global_head_dim=512)
seen = []
for name, read in (("getattr", lambda: getattr(config, "head_dim", None)), ("hasattr", lambda: hasattr(config, "head_dim"))):
    try:
        read()
        seen.append("no error")
    except Exception as error:
        seen.append(type(error).__name__)
        print(f"{name}: {type(error).__name__}, AttributeError: {isinstance(error, AttributeError)}")
sizes = config.to_dict()["head_dim"], config.per_layer_config["sliding_attention"].head_dim
full, is_there = config.per_layer_config["full_attention"].head_dim, hasattr(config, "global_head_dim")
print(f"to_dict: {sizes[0]}, a sliding layer {sizes[1]}, a full layer {full}, global_head_dim there: {is_there}")
as_believed = seen == ["no error"] * 2
sys.exit(as_believed or sizes != (256, 256) or full != 512 or is_there)
PY
"$work/venv/bin/python" "$work/probe.py" 2>/dev/null
