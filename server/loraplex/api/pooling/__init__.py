"""Classification, scores of pairs and rerankings, on the way of requests that generate.

- `schemas`: the bodies. `prompts`: the completions of no tokens that they become, fitted to the version that answers.
- `heads`: what a version's head can answer. `answers`: logits in, the answer out.
"""
