"""Errors of the data node."""


class DatasetError(Exception):
    """A dataset or its source cannot be used; the message names the file and the remedy."""
