"""Files and batches, as OpenAI's API has them."""
