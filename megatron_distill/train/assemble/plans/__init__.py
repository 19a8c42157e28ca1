"""The needs of a run before it starts: its ranks, its memory, and the shapes that a plan reads."""
