"""Datasets of the demo."""
