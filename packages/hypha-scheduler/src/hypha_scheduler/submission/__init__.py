"""Submitting a job to a running scheduler over a Unix socket."""
