"""Weights and configurations of Hugging Face models, both ways."""
