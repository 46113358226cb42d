"""Auction, allocation and renewal of leases."""
