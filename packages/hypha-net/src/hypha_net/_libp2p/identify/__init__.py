"""Identify: what peers report about themselves, and repeated requests
(https://github.com/libp2p/specs/blob/master/identify/README.md)."""
