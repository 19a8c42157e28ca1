"""Corpora, tokenizers, packing and the resumable loader.

Only the first rank reads: `sources.open_training` and `sources.read_held_out` make the samples,
`loader.StepLoader` hands every rank its micro-batches.
"""
