"""Why a local network could not be brought up, or did not do its job."""


class LocalError(Exception):
    """Base of the errors this package raises; the message says what happened and where to look."""


class RunDirectoryError(LocalError):
    """The run directory cannot be used; nothing in it was touched."""


class ProcessFailedError(LocalError):
    """A program of the network ended before its time; the message ends with its last lines."""
