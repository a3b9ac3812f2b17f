"""Tinker's own SDK against a server. Argument 1 is JSON with `url`, `key`, `base`, `paths` and `prompt`. Prints JSON:
the result of each call, or the class of its error and its words."""

import json
import os
import sys

os.environ["TINKER_TELEMETRY"] = "0"

import tinker
from tinker import types

given = json.loads(sys.argv[1])
found = {}
prompt = types.ModelInput.from_ints(given["prompt"])


def say(name, call):
    try:
        found[name] = call()
    except Exception as error:
        found[name] = [type(error).__name__, str(error)]


def sampled(client, **options):
    params = types.SamplingParams(max_tokens=6, temperature=options.pop("temperature", 0.0), **options)
    answer = client.sample(prompt, 1, params, include_prompt_logprobs=True).result()
    (sequence,) = answer.sequences
    return [sequence.tokens, sequence.logprobs, answer.prompt_logprobs, sequence.stop_reason]


with tinker.ServiceClient(base_url=given["url"], api_key="tml-" + given["key"]) as service:
    models = service.get_server_capabilities().supported_models
    found["models"] = [model.model_name for model in models]
    base = service.create_sampling_client(base_model=given["base"]).result()
    for name, path in given["paths"].items():
        say(name, lambda path=path: sampled(service.create_sampling_client(model_path=path).result()))
    say("base", lambda: sampled(base))
    say("scored", lambda: base.compute_logprobs(prompt).result())
    say("seeded", lambda: [sampled(base, temperature=1.0, seed=5)[0] for _ in range(2)])
    many = types.SamplingParams(max_tokens=6, temperature=0.0)
    futures = [base.sample(prompt, 1, many) for _ in range(32)]
    found["many"] = [future.result().sequences[0].tokens for future in futures]
    say("training", lambda: str(service.create_lora_training_client(base_model=given["base"]).result()))
print(json.dumps(found), flush=True)
os._exit(0)
