"""py-libp2p 0.8.1 as the engine, and the only place that imports it.

Kept of it: multistream-select, identify, ping, the swarm's registry of connections and streams, gossipsub. Ours
instead, because the stock parts fail (docs/libp2p.md): mutual TLS (`security`), yamux (`muxer`), dialling and accepting
(`connections`), the DHT (`kad`). `engine` joins them to an `Endpoint`, and translates every error of the library.
"""

from hypha_net._libp2p.compat.lean_import import install

install()
