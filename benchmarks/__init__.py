"""Benchmarks of the network against references measured in the same run; see README.md."""
