"""Deciding which requests are worth an offer."""
