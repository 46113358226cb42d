"""Hypha's wire protocol: message types, strict CBOR and JSON codecs, protocol ids, job specs and update files.

Start with `protocols` (which exchange uses which messages) and `codec` (values to bytes and back). Every message is a
frozen `msgspec` struct; reading one from bytes validates it completely. Malformed input raises `errors.DecodeError`.
"""
