"""Keys of job tables that name a file by where it is: a name, a bucket and key, a URL, or a digest."""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, ConfigDict, Field

from hypha_net.node.config.models import Section, is_web_url
from hypha_proto.ids import is_inside

Content = Literal["model", "preprocessor", "dataset", "files"]
"""What the files of a table are."""
MAX_TEXT: Final = 2048
BUCKET: Final = r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$"
"""Names of S3 buckets."""


def check_url(text: str) -> str:
    """Return a URL that connectors know.

    Raises:
        ValueError: it is none.
    """
    if is_web_url(text) or (text.startswith(("file:///", "s3://")) and text.isprintable()):
        return text
    if text.startswith("sha256:"):
        return f"sha256:{check_sha256(text)}"
    raise ValueError("must be a URL that starts with https://, http://, file:/// or s3://, or sha256:<64 hex digits>")


def check_sha256(text: str) -> str:
    """Return the 64 hex digits of a SHA-256, with or without ``sha256:`` before them.

    Raises:
        ValueError: it is none.
    """
    digits = text.removeprefix("sha256:").lower()
    if not re.fullmatch(r"[0-9a-f]{64}", digits):
        raise ValueError(f"has {len(digits)} characters, not the 64 hex digits of a SHA-256; sha256sum FILE prints it")
    return digits


def check_file_name(name: str) -> str:
    """Return a path that stays in its repository or directory.

    Raises:
        ValueError: it is none.
    """
    if not is_inside(name):
        raise ValueError(f"{name!r} is not a relative path inside the repository or directory")
    return name


FileName = Annotated[str, AfterValidator(check_file_name)]
Url = Annotated[str, Field(max_length=MAX_TEXT), AfterValidator(check_url)]
Sha256 = Annotated[str, AfterValidator(check_sha256)]


class S3Table(Section):
    """``[.s3]``."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    bucket: str = Field(pattern=BUCKET, description="Bucket of the S3 service that the workers' owners have set.")
    key: str = Field(min_length=1, max_length=1024, description="Key of the object.")
    presigned: bool = Field(
        default=False,
        description="Whether workers get a URL instead, signed with the keys of scheduler.connectors and valid for 7 "
        "days, so that they need no keys of their own; their owners then allow its host (connectors.hosts).",
    )
