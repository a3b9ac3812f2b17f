"""Adapters that mlx-lm saved, turned into PEFT's form of the same adapter.

`convert.convert_mlx` rewrites the two files of an upload; `settings.read_mlx_settings` reads mlx-lm's config.
"""
