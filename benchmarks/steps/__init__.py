"""A training step of ours, and the peer's."""
