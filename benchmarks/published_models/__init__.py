"""The model, the draws and the ranks of benchmarks/published.py."""
