"""A whole Hypha network on one machine, as real processes."""
