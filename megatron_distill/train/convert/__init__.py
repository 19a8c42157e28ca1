"""Hugging Face folders to checkpoints and back."""
