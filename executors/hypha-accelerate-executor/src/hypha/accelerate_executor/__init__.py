"""Trains Hugging Face models for a Hypha worker with DiLoCo."""
