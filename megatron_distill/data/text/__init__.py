"""Documents and token streams from files."""
