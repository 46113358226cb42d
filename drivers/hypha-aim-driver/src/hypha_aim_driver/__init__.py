"""Turns a Hypha scheduler's status posts into AIM runs."""
