"""Yamux stream multiplexer: session, streams, receive windows (https://github.com/hashicorp/yamux/blob/master/spec.md)."""
