"""Encoding and decoding errors."""


class ProtoError(Exception):
    """Base class of the errors that this package raises."""


class InvalidIdError(ProtoError, ValueError):
    """Malformed peer id or digest."""


class DecodeError(ProtoError, ValueError):
    """Bytes or JSON that do not represent the expected message.

    Attributes:
        path: position of the error in the message, such as ``spec.executor[0].name``; empty for the whole message.
        reason: what is wrong at that position.
    """

    def __init__(self, reason: str, path: str = "") -> None:
        super().__init__(f"{path}: {reason}" if path else reason)
        self.path = path
        self.reason = reason


class EncodeError(ProtoError, ValueError):
    """Message with a value that cannot be encoded.

    Attributes:
        path: position of the value in the message.
        reason: what is wrong with it.
    """

    def __init__(self, reason: str, path: str = "") -> None:
        super().__init__(f"{path}: {reason}" if path else reason)
        self.path = path
        self.reason = reason


class TensorFileError(ProtoError, ValueError):
    """Malformed safetensors file, or one that does not match the model it is applied to."""
