"""Errors of the data node, and how they show a value."""


class DatasetError(Exception):
    """A dataset or its source cannot be used; the message names the file and the remedy."""


def quote(value: object) -> str:
    """Return a value for a message, in quotes if it is text, at most about 60 characters."""
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:60]}…"
