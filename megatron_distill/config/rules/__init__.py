"""Rules over several keys, checked before models and data are opened."""
