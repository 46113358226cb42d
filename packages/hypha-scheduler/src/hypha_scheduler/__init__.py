"""Discovers, leases, schedules and tracks Hypha jobs and keeps the trained model."""
