"""Connectors: fetching resources from peers, the scheduler's data set, the Hugging Face Hub, URLs and files."""
