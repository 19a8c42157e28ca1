"""Megatron-Core GPT models that end at the hidden state, for teacher and student."""
