"""Files on web servers: resumed by ranges (RFC 9110, section 14), redirects and addresses checked.

For each request and redirect the name is resolved, and a connection is made only to an address that passed the check.
Proxies of the environment are not used. `httpcore` and `httpx` are imported when the first download needs them.
"""

from __future__ import annotations

import base64
import functools
import re
import socket
import ssl
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol
from urllib.parse import unquote, urljoin

import anyio

from hypha_net.connectors.content import BLOCK, IDLE_TIMEOUT, ContentStream, SourceInterruptedError
from hypha_net.connectors.errors import FetchError, bad_request, not_found, source_failed, timed_out
from hypha_net.redaction import shown_url

if TYPE_CHECKING:
    import httpcore

CONNECT_TIMEOUT: Final = 30.0
"""Seconds for connecting to one address of a server."""
_REDIRECTS: Final = 5
_TEMPORARY: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
_RANGE: Final = re.compile(r"bytes (\d{1,18})-\d{1,18}/(\d{1,18}|\*)", re.ASCII)
_LENGTH: Final = re.compile(r"\d{1,18}", re.ASCII)


class HttpAccess(Protocol):
    """Decides which URLs and addresses may be read."""

    def check_url(self, url: str) -> None:
        """Refuse a URL, also of a redirect, that may not be read: raise an error, which is passed on."""
        ...

    def allowed_addresses(self, host: str, addresses: Sequence[str]) -> list[str]:
        """Return the addresses of a host that may be connected to; raise an error if there are none."""
        ...


@dataclass(frozen=True, slots=True)
class HttpSource:
    """File at an ``http:`` or ``https:`` URL."""

    url: str
    access: HttpAccess

    @property
    def name(self) -> str:
        """See `ContentSource.name`."""
        return shown_url(self.url)

    @property
    def cache_key(self) -> tuple[str, str]:
        """See `ContentSource`. Presigned URLs of one object differ in the signature alone, which S3 checks."""
        return "uri", _without_signature(self.url)

    @asynccontextmanager
    async def open(self, offset: int, version: str) -> AsyncGenerator[ContentStream | None]:
        """See `ContentSource.open`. Asks for a range only if the server has stated what identifies the content."""
        url, wanted = self.url, offset if version else 0
        async with open_pool(self.access) as pool:
            for _ in range(_REDIRECTS + 1):
                self.access.check_url(url)
                target, headers = _request(url, wanted, version)
                with _http_errors(url):
                    async with pool.stream("GET", target, headers=headers, extensions=_TIMEOUTS) as response:
                        location = _redirect(response)
                        if location is None:
                            yield _content(response, url, wanted, version)
                            return
                url = urljoin(url, location)
        raise source_failed(f"{self.name}: more than {_REDIRECTS} redirects")


_TIMEOUTS: Final = {
    "timeout": {"connect": CONNECT_TIMEOUT, "read": IDLE_TIMEOUT, "write": IDLE_TIMEOUT, "pool": IDLE_TIMEOUT}
}


def _without_signature(url: str) -> str:
    """Return a URL without the parameters of an AWS signature (SigV4, in the query), if it has one."""
    if "X-Amz-Signature=" not in url:
        return url
    start, _, query = url.partition("?")
    return f"{start}?{'&'.join(part for part in query.split('&') if not part.startswith('X-Amz-'))}"


def _request(url: str, offset: int, version: str) -> tuple[httpcore.URL, list[tuple[str, str]]]:
    """Return the target of a request and its headers."""
    import httpcore
    import httpx

    try:
        parsed = httpx.URL(url)
        target = httpcore.URL(scheme=parsed.raw_scheme, host=parsed.raw_host, port=parsed.port, target=parsed.raw_path)
    except (httpx.InvalidURL, UnicodeError, ValueError) as error:
        raise bad_request(f"value: {shown_url(url)!r} is no URL ({error}): write https://host/path") from None
    headers = {"Host": parsed.netloc.decode("ascii"), "Accept": "*/*", "Accept-Encoding": "identity"}
    headers["User-Agent"] = "hypha"
    if parsed.userinfo:
        user, _, password = parsed.userinfo.decode("ascii").partition(":")
        pair = f"{unquote(user)}:{unquote(password)}".encode()
        headers["Authorization"] = f"Basic {base64.b64encode(pair).decode()}"
    if offset:
        headers |= {"Range": f"bytes={offset}-", "If-Range": version}
    elif version:
        headers["If-None-Match" if version.startswith('"') else "If-Modified-Since"] = version
    return target, list(headers.items())


# ----------------------------------------------------------------------------------------------------------- answers


def _headers(response: httpcore.Response) -> Mapping[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in response.headers}


def _redirect(response: httpcore.Response) -> str | None:
    return _headers(response).get("location") if response.status in (301, 302, 303, 307, 308) else None


def _content(response: httpcore.Response, url: str, wanted: int, version: str) -> ContentStream | None:
    """Return the content of an answer, or None if it is unchanged; `wanted` is the first byte that was asked for."""
    if response.status == 304 and version and not wanted:
        return None
    _check_status(response.status, url, wanted)
    headers = _headers(response)
    if (coding := headers.get("content-encoding", "identity").strip().lower()) != "identity":
        raise source_failed(f"{shown_url(url)}: the server sends it encoded ({coding}), which was not asked for")
    if response.status == 206:
        offset, size = _range(headers, url)
    else:
        offset, size = 0, _length(headers, url)
    return ContentStream(_blocks(response, url), offset, size, _version(headers))


def _check_status(status: int, url: str, wanted: int) -> None:
    if status == 200 or (status == 206 and wanted):
        return
    shown = f"{shown_url(url)} answered with status {status}"
    if status == 416 and wanted:
        raise SourceInterruptedError(source_failed(shown), restart=True)
    if status in (404, 410):
        raise not_found(shown)
    error = source_failed(shown)
    raise SourceInterruptedError(error) if status in _TEMPORARY else error


def _range(headers: Mapping[str, str], url: str) -> tuple[int, int | None]:
    found = _RANGE.fullmatch(headers.get("content-range", "").strip())
    if found is None:
        raise source_failed(f"{shown_url(url)}: the server does not say which bytes it sends (Content-Range)")
    return int(found[1]), None if found[2] == "*" else int(found[2])


def _length(headers: Mapping[str, str], url: str) -> int | None:
    text = headers.get("content-length")
    if text is None:
        return None
    if not _LENGTH.fullmatch(text.strip()):
        raise source_failed(f"{shown_url(url)}: the server states a length that is none: {text!r}")
    return int(text)


def _version(headers: Mapping[str, str]) -> str:
    """Return the strong validator of an answer (RFC 9110, section 8.8), or an empty text."""
    etag = headers.get("etag", "").strip()
    if etag and not etag.startswith("W/"):
        return etag
    return headers.get("last-modified", "").strip()


async def _blocks(response: httpcore.Response, url: str) -> AsyncGenerator[bytes]:
    with _http_errors(url):
        async for block in response.aiter_stream():
            yield block


@contextmanager
def _http_errors(url: str) -> Iterator[None]:
    """Translate the errors of httpcore."""
    import httpcore

    try:
        yield
    except httpcore.TimeoutException as error:
        raise SourceInterruptedError(_error(timed_out, url, error)) from error
    except (httpcore.NetworkError, httpcore.RemoteProtocolError) as error:
        raise SourceInterruptedError(_error(source_failed, url, error)) from error
    except (httpcore.ProtocolError, httpcore.UnsupportedProtocol) as error:
        raise _error(source_failed, url, error) from error


def _error(make: Callable[[str], FetchError], url: str, error: Exception) -> FetchError:
    return make(f"{shown_url(url)}: {type(error).__name__}: {str(error) or 'no reason is stated'}")


# ------------------------------------------------------------------------------------------------------- connections


def read_large_blocks() -> None:
    """Have httpcore read up to `BLOCK` bytes of a response at once, on all connections of this process.

    With its 64 KiB a download takes half as much processor time again.
    """
    import httpcore

    httpcore.AsyncHTTP11Connection.READ_NUM_BYTES = BLOCK


@functools.cache
def _ssl_context() -> ssl.SSLContext:
    """Return what verifies servers; made once, since it reads all certificates (15 ms)."""
    import httpx

    return httpx.create_ssl_context()


@asynccontextmanager
async def open_pool(access: HttpAccess) -> AsyncGenerator[httpcore.AsyncConnectionPool]:
    """Open a pool whose connections go to allowed addresses only."""
    import httpcore

    read_large_blocks()

    class Backend(httpcore.AnyIOBackend):
        """Resolves names itself and connects to the addresses that are allowed."""

        async def connect_tcp(
            self,
            host: str,
            port: int,
            timeout: float | None = None,
            local_address: str | None = None,
            socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
        ) -> httpcore.AsyncNetworkStream:
            failure: Exception = httpcore.ConnectError("the name has no address")
            for address in access.allowed_addresses(host, await _resolve(host, port)):
                try:
                    return await super().connect_tcp(address, port, timeout, local_address, socket_options)
                except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                    failure = error
            raise failure

    async with httpcore.AsyncConnectionPool(ssl_context=_ssl_context(), network_backend=Backend()) as pool:
        yield pool


async def _resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a host in the order of the resolver."""
    import httpcore

    try:
        with anyio.fail_after(CONNECT_TIMEOUT):
            found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except TimeoutError:
        raise httpcore.ConnectTimeout(f"the name was not resolved within {CONNECT_TIMEOUT:g} s") from None
    except (OSError, UnicodeError) as error:
        raise httpcore.ConnectError(f"the name cannot be resolved: {error}") from None
    return list(dict.fromkeys(str(address[4][0]) for address in found))
