"""The known families: each is one module of this package with a `FAMILY`."""
