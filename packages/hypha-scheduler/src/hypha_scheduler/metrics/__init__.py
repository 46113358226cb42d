"""Metrics of jobs: status bridge to drivers, TensorBoard files, traffic counts."""
