"""A teacher's signals, written to a store."""
