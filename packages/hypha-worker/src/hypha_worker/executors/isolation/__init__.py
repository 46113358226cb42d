"""Isolation of executors from the machine that runs them: its layers, and what applies them."""
