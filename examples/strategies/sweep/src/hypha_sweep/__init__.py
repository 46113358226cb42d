"""Strategy ``sweep``: trains variants of a small job side by side and keeps the one with the lowest loss."""
