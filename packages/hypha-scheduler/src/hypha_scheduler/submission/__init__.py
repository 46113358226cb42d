"""Submission of jobs to a running scheduler over a Unix socket."""
