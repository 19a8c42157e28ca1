"""Memory, time and cost of a run before it starts: layouts that fit a number of devices, ranked."""
