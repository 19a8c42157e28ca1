"""Distillation of large GPT models on Megatron-Core."""

__version__ = "0.1.0"

__all__ = ["__version__"]
