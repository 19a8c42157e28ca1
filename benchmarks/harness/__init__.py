"""Processes, peaks of memory, a quiet machine and reports, for all benchmarks."""
