"""Executors that run as a process of their own."""
