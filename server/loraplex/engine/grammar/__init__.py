"""Structured output: which tokens a grammar allows next. By llguidance; no torch.

`tokenizer.load_grammar_tokenizer` makes the vocabulary that grammars are built over, and `tokenizer.parser_limits` the
limits that they are built under, for the engine and for the checker of the API side. `matchers.GrammarMatchers`
builds the matchers of requests while these wait. `masks.MaskMaker` fills a step's masks while its forward pass runs.
"""
