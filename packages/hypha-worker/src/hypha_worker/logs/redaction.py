"""Hides secrets in the output of executors before a scheduler reads it.

Hidden are the parts of URLs that `hypha_net.redaction` hides, tokens of well-known forms, values assigned to names such
as ``token`` or ``password``, and values of the owner's variables with such names. All patterns take linear time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from hypha_net.redaction import HIDDEN, redact_urls

_MIN_LENGTH: Final = 6
"""Shorter values are no secrets, and would be hidden in many words."""
SECRET_NAME: Final = re.compile(
    r"token|passw|secret|credential|(^|_)(key|pass|passphrase)(_|$)|username", re.IGNORECASE
)
_AFTER_SCHEME: Final = re.compile(r"""://[^\s"'<>`]+""")
_TOKEN: Final = re.compile(
    r"\b(?:hf_\w{16,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|sk-[\w-]{16,}|AKIA[A-Z0-9]{16}|xox[abprs]-[\w-]{10,}"
    r"|eyJ[\w-]{8,}\.[\w.-]{8,})"
)
_AUTHORIZATION: Final = re.compile(r"\b(bearer|basic)([ \t]{1,4})[\w.~+/=-]{8,}", re.IGNORECASE)
_ASSIGNED: Final = re.compile(
    r"""((?:token(?!s|i)|passwo?r?d|secret|credential|(?:api|access|private)[_-]?key)"""
    r"""\w{0,16}["']?[ \t]{0,4}[=:][ \t]{0,4})"""
    r"""(?![\d.,]+(?:\s|$)|null\b|none\b|true\b|false\b)("[^"\n]*"|'[^'\n]*'|[^\s,;"'}]+)""",
    re.IGNORECASE,
)


class LogRedaction:
    """Hides secrets in whole lines."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        """Also hide these values wherever they occur."""
        self._values = sorted({value for value in values if len(value) >= _MIN_LENGTH}, key=len, reverse=True)

    def clean(self, text: str) -> str:
        """Return lines without secrets."""
        for value in self._values:
            text = text.replace(value, HIDDEN)
        text = _AFTER_SCHEME.sub(lambda found: redact_urls(f"x{found[0]}")[1:], text)
        text = _TOKEN.sub(HIDDEN, text)
        text = _AUTHORIZATION.sub(rf"\1\2{HIDDEN}", text)
        return _ASSIGNED.sub(rf"\1{HIDDEN}", text)


def secret_values(environment: Mapping[str, str]) -> list[str]:
    """Return the values of variables whose names are those of secrets."""
    return [value for name, value in environment.items() if SECRET_NAME.search(name)]
