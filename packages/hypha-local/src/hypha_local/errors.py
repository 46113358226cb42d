"""Errors of a local network."""


class LocalError(Exception):
    """Base class of the errors that this package raises; the message says what happened and where to look."""


class RunDirectoryError(LocalError):
    """The run directory cannot be used; nothing in it was changed."""


class NoFreePortError(LocalError):
    """There are fewer free TCP ports than nodes."""


class ProcessFailedError(LocalError):
    """A program of the network exited unexpectedly; the message ends with the last lines of its log."""


class ModelUnusableError(LocalError):
    """A model directory cannot be used for the chosen task."""


class DatasetUnusableError(LocalError):
    """A folder named as a dataset is none, or its name is taken."""
