"""Rules between keys, checked before anything is read."""
