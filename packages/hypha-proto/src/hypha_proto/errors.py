"""Encoding and decoding errors."""


class ProtoError(Exception):
    """Base class of the errors that this package raises."""


class InvalidIdError(ProtoError, ValueError):
    """Malformed peer id or digest."""


class _MessageError(ProtoError, ValueError):
    """A value of a message is wrong.

    Attributes:
        path: position of the value in the message, such as ``spec.executor[0].name``; empty for the whole message.
        reason: what is wrong at that position.
    """

    def __init__(self, reason: str, path: str = "") -> None:
        super().__init__(f"{path}: {reason}" if path else reason)
        self.path = path
        self.reason = reason


class DecodeError(_MessageError):
    """Bytes or JSON that do not represent the expected message."""


class EncodeError(_MessageError):
    """Message with a value that cannot be encoded."""


class TensorFileError(ProtoError, ValueError):
    """Malformed safetensors file, or one that does not match the model it is applied to."""
