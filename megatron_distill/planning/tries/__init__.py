"""The choices that a search of layouts tries, and bounds that leave slow ones out of it."""
