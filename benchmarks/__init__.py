"""Timings of `mla_torch` and `mla_jax` beside FlashMLA, in one process."""
