"""Keeps a job's access tokens out of everything that the executor writes.

A worker hands jobs over with tokens as null and puts them back when it fetches. Where one comes all the same (a worker
of another make, an error text that quotes a request) it is blotted out of log records before any handler sees them.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Final

from hypha_proto.job_spec import HuggingFaceReference, TrainConfig

BLOT: Final = "***"


class Redaction(logging.Filter):
    """Replaces secrets in the text of log records."""

    def __init__(self, secrets: Collection[str]) -> None:
        super().__init__()
        self._secrets = sorted(filter(None, secrets), key=len, reverse=True)

    def filter(self, record: logging.LogRecord) -> bool:
        """Blot secrets out of the message and of a traceback; every record passes."""
        message, text = record.getMessage(), record.exc_text
        if record.exc_info and not text:
            text = logging.Formatter().formatException(record.exc_info)
        record.msg, record.args, record.exc_text = self.clean(message), None, text and self.clean(text)
        return True

    def clean(self, text: str) -> str:
        """Give the text without the secrets."""
        for secret in self._secrets:
            text = text.replace(secret, BLOT)
        return text


def secrets_of(config: TrainConfig) -> frozenset[str]:
    """Collect the tokens that stand in a job."""
    references = [config.model.artifact, config.data, config.updates, config.results]
    if config.preprocessor is not None:
        references.append(config.preprocessor.artifact)
    found = (reference.token for reference in references if isinstance(reference, HuggingFaceReference))
    return frozenset(token for token in found if token)


def hide(secrets: Collection[str]) -> None:
    """Blot secrets out of all that this process logs from now on."""
    if not secrets:
        return
    redaction = Redaction(secrets)
    for handler in logging.getLogger().handlers:
        handler.addFilter(redaction)
