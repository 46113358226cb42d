"""Who says it to whom: identity, mutual TLS, the libp2p endpoint, transfer, and the chassis of every Hypha daemon."""
