"""From the text of a choice to the parts of an answer: text, reasoning and calls of tools.

`parts.Part` is what an answer consists of, in order. `parser.OutputParser` makes parts while the text comes;
`parser.PlainParser` makes text only.
"""
