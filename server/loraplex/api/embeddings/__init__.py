"""OpenAI's embeddings, on the way of requests that generate.

- `schemas.EmbeddingsRequest`: the body. `schemas.PromptsToEmbed`: the completion of no tokens that it becomes.
- `answers.EmbeddingsAnswer`: pooled hidden states in, the answer out.
"""
