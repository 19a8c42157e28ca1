"""Launches on a cluster: what needs no cluster."""
