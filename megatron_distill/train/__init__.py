"""Training: assembly, step, loop, optimizer, checkpoints, metrics, progress."""
