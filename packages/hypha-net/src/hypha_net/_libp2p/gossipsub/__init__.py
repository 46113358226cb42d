"""Gossipsub on py-libp2p (https://github.com/libp2p/specs/tree/master/pubsub/gossipsub).

`setup` configures it, `validation` checks incoming messages, `flood_publish` sends to every subscriber,
`stream_migration` moves streams between connections, `subscriptions` serves local subscribers.
"""
