"""Sampling: from logits to a token for each row, and their log probabilities.

`sampler.make_sampler` chooses the sampler of a backend. `batch.build_sample_rows` gathers the options of a step's
rows. `noise.uniform` is the randomness, a function of seed and position. `scoring.score_tokens` computes log
probabilities. `logprobs.Logprobs` carries them to the client, without torch.
"""
