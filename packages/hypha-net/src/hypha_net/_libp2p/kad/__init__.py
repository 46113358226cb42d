"""Kademlia DHT: client, server, record store, messages (https://github.com/libp2p/specs/tree/master/kad-dht)."""
