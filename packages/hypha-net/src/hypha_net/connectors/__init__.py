"""Connectors: files from web servers and S3 buckets, for workers and schedulers alike."""
