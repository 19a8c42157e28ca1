"""Evaluation of trained models: result tables, loss curves, and generated text."""
