"""Reports of a run before it starts: banner, memory, layout, and the inputs of a plan."""
