"""Keys of the S3 service that a node reads buckets from; tables of workers and schedulers include them."""

from __future__ import annotations

from pydantic import Field, field_validator, model_validator

from hypha_net.connectors.s3_client import S3Settings
from hypha_net.node.config.models import Section, is_web_url
from hypha_net.redaction import has_url_secrets


class S3ServiceSection(Section):
    """Endpoint, region and credentials."""

    s3_endpoint: str | None = Field(
        default=None, description="URL of the S3 service; if unset, that of AWS in s3_region."
    )
    s3_region: str | None = Field(default=None, description="Region of the buckets; needed without s3_endpoint.")
    s3_access_key: str | None = Field(default=None, description="Key id for S3; if unset, requests are not signed.")
    s3_secret_key: str | None = Field(default=None, description="Secret key for S3.")

    @property
    def s3_settings(self) -> S3Settings:
        """The service, for `S3Client`."""
        return S3Settings(self.s3_endpoint, self.s3_region, self.s3_access_key, self.s3_secret_key)

    @field_validator("s3_endpoint")
    @classmethod
    def _is_url(cls, value: str | None) -> str | None:
        if value is not None and (not is_web_url(value) or has_url_secrets(value)):
            raise ValueError("must be a URL such as https://s3.example.org, without user, query and fragment")
        return value

    @model_validator(mode="after")
    def _has_both_keys(self) -> S3ServiceSection:
        if (self.s3_access_key is None) != (self.s3_secret_key is None):
            raise ValueError("s3_access_key and s3_secret_key belong together: set both, or neither")
        return self
