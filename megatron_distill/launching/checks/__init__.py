"""Checks of a job's nodes before the ranks start: each node's own, and messages between them."""
