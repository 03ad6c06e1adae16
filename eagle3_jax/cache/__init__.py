"""The static-shape paged key-value cache."""
