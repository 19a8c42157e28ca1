"""The two sides of benchmarks/cross_tokenizer.py."""
