"""The process executor: runs a job as a separate process with its bridge."""
