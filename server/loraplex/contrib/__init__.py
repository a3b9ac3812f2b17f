"""Parts for other programs. They import nothing else of Loraplex: each file may be copied alone.

Entry point: `loraplex.contrib.transformers.PushCallback`, for training loops.
"""
