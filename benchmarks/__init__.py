"""Measurements of the training step, alone and beside its peer. Run from the repository's root."""
