"""Streams: opening and accepting them, protocol negotiation, and the `Stream` that applications use."""
