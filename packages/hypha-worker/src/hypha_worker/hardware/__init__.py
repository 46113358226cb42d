"""Detecting the machine's resources and measuring their use: cores, memory, disks, GPUs."""
