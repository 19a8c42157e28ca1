"""Losses between models with different tokenizers, on tiles of aligned rows."""
