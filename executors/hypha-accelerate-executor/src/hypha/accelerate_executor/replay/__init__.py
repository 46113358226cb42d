"""Replay: computes the rounds of a DiLoCo job again from its record, in one process, and compares."""
