"""Patches and replacements of parts of py-libp2p 0.8.1; docs/libp2p.md lists what they cure."""
