"""The DiLoCo worker loop: inner steps, pseudo-gradients, merging outer updates (arXiv:2311.08105)."""
