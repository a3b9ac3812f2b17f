"""Fields that set the form of an answer: OpenAI's `response_format` and vLLM's `structured_outputs`.

`fields` has the two objects as clients send them. `constraint.constraint_of` makes one grammar of them.
"""
