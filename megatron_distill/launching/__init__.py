"""Launches of a job on a cluster: preflight, node health, ranks, their outcome, the next launch."""
