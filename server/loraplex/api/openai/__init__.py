"""OpenAI's wire: requests in, answers out. Nothing here knows the engine's client or a tenant's limits.

- `schemas.ChatRequest`, `schemas.CompletionRequest`: every field of a request; `strict` refuses the others by name.
- `body.read_json`, `parsing.parse_request`: from bytes to a checked request, or to the first error.
- `formats.ChatFormat`, `formats.CompletionFormat`: answers and stream chunks; `logprobs` and `echo` fill them.
- `answer_schemas`, `described`: what the OpenAPI document says of answers, and of rules between fields.
"""
