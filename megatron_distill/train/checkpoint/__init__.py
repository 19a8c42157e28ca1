"""Sharded checkpoints that any layout resumes."""
