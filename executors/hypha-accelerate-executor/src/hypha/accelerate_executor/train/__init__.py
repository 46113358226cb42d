"""The training step and the inner optimizer."""
