"""Hides the secret parts of URLs in texts that people or other peers read: logs, errors, spans.

User information (``user:password@``), queries and fragments: a presigned URL has its signature in the query.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from hypha_proto.texts import shorten

HIDDEN: Final = "***"
_URL: Final = re.compile(r"""://[^\s"'<>`]+""")
"""Begins after the scheme, so that a long text takes linear time."""
_USER: Final = re.compile(r"//[^/?#]*@")
_QUERY: Final = re.compile(r"([?#]).*", re.DOTALL)
_PUNCTUATION: Final = ".,:;!)]}"
"""Characters at the end of a URL that belong to the sentence or bracket around it."""
_PARTS: Final = re.compile(r"://([^/?#\\]*@)?([^?#]*)([?#].*)?", re.DOTALL)


def redact_urls(text: str) -> str:
    """Replace user information, query and fragment of each URL in a text by ``***``.

    Call it before a text is shortened: a part of a URL cannot be recognized.
    """
    return _URL.sub(lambda found: _redact(found[0]), text) if "://" in text else text


def _redact(found: str) -> str:
    url = found.rstrip(_PUNCTUATION)
    parts = _PARTS.fullmatch(url)
    if parts is None:
        return found
    user, rest, query = parts.groups()
    return f"://{HIDDEN + '@' if user else ''}{rest}{query[0] + HIDDEN if query else ''}{found[len(url) :]}"


def shown_url(url: str) -> str:
    """Return a URL, or what should be one, as an error shows it: without secret parts, and of bounded length."""
    shown = _USER.sub(f"//{HIDDEN}@", redact_urls(url))
    return shorten(_QUERY.sub(rf"\1{HIDDEN}", shown), 120)


def has_url_secrets(url: str) -> bool:
    """Return whether a URL has parts that `redact_urls` hides."""
    return redact_urls(url) != url


def without_url_secrets(url: str, mark: str) -> str:
    """Return a URL without its secret parts, and with `mark` as its query, so that several can be told apart."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return f"invalid:?{mark}"
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query=mark, fragment=""))
