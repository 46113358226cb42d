"""Metrics of jobs: event file, status bridge to drivers, TensorBoard export."""
