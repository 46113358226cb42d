"""What py-libp2p 0.8.1 needs around it: replacements and patches, each pinned by a test that names its reason."""
