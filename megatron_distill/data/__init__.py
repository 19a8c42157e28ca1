"""Corpora, tokenizers, packing and the resumable loader.

Only rank 0 reads: `sources.open_training` and `sources.read_held_out` make the samples,
`loader.StepLoader` sends every rank its micro-batches.
"""
