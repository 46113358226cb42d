"""Prepares, announces and serves datasets in a Hypha network."""
