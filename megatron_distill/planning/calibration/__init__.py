"""Rates of a machine, measured here."""
