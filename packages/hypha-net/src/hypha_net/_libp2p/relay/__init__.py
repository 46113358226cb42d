"""Circuit relay v2 and DCUtR hole punching (https://github.com/libp2p/specs/tree/master/relay)."""
