"""Evaluation of models in the layout of their ranks: the scorer, and evaluation during a run."""
