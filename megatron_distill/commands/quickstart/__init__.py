"""Both quickstarts: their runs, one after the other, and the comparison at the end."""
