"""Detecting and measuring the machine: cores, memory, disks, GPUs."""
