"""Devices and the processes that train together on one machine."""
