"""Text and tokens, without transformers.

`processor.TextProcessor` tokenises requests and makes streams of output text. `chat_template.ChatTemplate` renders a
model's chat template. `detokenize.TextStream` turns tokens into text as they come.
"""
