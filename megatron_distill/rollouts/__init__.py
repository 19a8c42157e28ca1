"""Rollouts: texts that a model writes for the prompts of a file, kept as data to train on."""
