"""Batch inference: computes one result for each row of the slices that the scheduler assigns."""
