"""AIM driver: receives the metrics that a Hypha scheduler posts, and writes them to AIM, one run per job.

A metric passes through `app` (HTTP), `retry_queue`, `runs` (which run it belongs to) and `repository` (AIM).
"""
