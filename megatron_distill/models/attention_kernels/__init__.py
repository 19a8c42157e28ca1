"""Exact causal attention over packed documents, one kernel for each kind of device and score."""
