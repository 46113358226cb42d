"""Gossipsub on py-libp2p: set-up, validation, flood publishing, subscriptions."""
