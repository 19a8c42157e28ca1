"""Times of pipeline stages, and results that a search of layouts keeps."""
