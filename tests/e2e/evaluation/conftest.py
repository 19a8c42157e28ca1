"""Evaluation needs no network: every test here runs without one."""

from tests.e2e.offline import without_network

__all__ = ["without_network"]
