"""Who says it to whom: identity, mutual TLS, the libp2p endpoint, transfer, and the chassis of every Hypha daemon."""

from hypha_net.open import EndpointSettings, open_endpoint

__all__ = ["EndpointSettings", "open_endpoint"]
