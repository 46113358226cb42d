"""Bidding: deciding which requests get an offer, and sending it."""
