"""Every way in which something that was said can be wrong."""


class ProtoError(Exception):
    """Base of the errors this package raises."""


class InvalidIdError(ProtoError, ValueError):
    """A peer id, uuid or digest is not well formed."""


class DecodeError(ProtoError, ValueError):
    """Bytes or JSON do not hold the message that was expected.

    Attributes:
        path: where in the message the fault lies, such as ``spec.executor[0].name``; empty for the whole.
        reason: what is wrong there.
    """

    def __init__(self, reason: str, path: str = "") -> None:
        super().__init__(f"{path}: {reason}" if path else reason)
        self.path = path
        self.reason = reason


class EncodeError(ProtoError, ValueError):
    """A message holds a value that the wire cannot carry (`path` says where)."""

    def __init__(self, reason: str, path: str = "") -> None:
        super().__init__(f"{path}: {reason}" if path else reason)
        self.path = path
        self.reason = reason


class TensorFileError(ProtoError, ValueError):
    """A safetensors file is malformed, or does not fit the model that it is meant for."""
