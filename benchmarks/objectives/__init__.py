"""The losses of benchmarks/losses.py, ours and the peers'."""
