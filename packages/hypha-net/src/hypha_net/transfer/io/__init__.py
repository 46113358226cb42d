"""Copying of bytes between streams, files and buffers, with digests."""
