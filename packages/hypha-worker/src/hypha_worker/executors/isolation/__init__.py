"""Isolation of executors from the machine that runs them: one module for each layer, and what applies them."""
