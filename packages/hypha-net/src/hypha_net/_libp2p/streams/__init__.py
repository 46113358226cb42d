"""Streams of the libp2p endpoint: the application's stream, accepting, opening, protocol negotiation."""
