"""What a run tells before it starts: its banner, its memory, its layout, and what a plan reads."""
