"""Evaluation tasks: their records and files, prompts, graders and results."""
