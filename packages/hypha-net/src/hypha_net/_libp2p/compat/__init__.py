"""Everything that patches or replaces a part of py-libp2p 0.8.1."""
