"""The endpoint over py-libp2p 0.8.1; only this package imports that library.

Used of it: multistream-select for its own protocols, identify, ping, the swarm's registry of connections and streams,
gossipsub. Replaced, for the reasons in docs/libp2p.md: mutual TLS (`security`), yamux (`yamux`), dialling and
accepting (`dial`), streams (`streams`), circuit relay (`relay`), the DHT (`kad`). `endpoint` assembles them into an
`Endpoint` and translates every error of the library.
"""

from hypha_net._libp2p.compat.lean_import import install

install()
