"""Requests to the Hugging Face Hub, bounded in bytes, redirects and time.

The requests use the client, the token and the endpoint of huggingface_hub. Its own methods read answers of any length,
so `HubClient` reads the body of each answer itself, without compression, and follows redirects itself. The client waits
as long as bytes arrive, so `HubClient` ends answers that take too long. The token goes to the endpoint's own host only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin, urlsplit

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import build_hf_headers, get_session

from tiewise.checkpoint.file_sources import HubError
from tiewise.checkpoint.time_limits import OutOfTime, TimeLimit, call_within
from tiewise.checkpoint.untrusted import short
from tiewise.core import __version__
from tiewise.core.errors import one_line_message
from tiewise.core.files import format_bytes

MOST_REDIRECTS = 5  # of one request
LONGEST_REDIRECT = 4096  # bytes of a redirect's body that are read
MOST_HEADERS = 2**16  # bytes of all headers of one answer; the Hub sends about 3,000
TIMEOUT: float = huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT  # seconds without progress, 10 by default
# seconds of an answer's headers; a body of n bytes may take as long plus n / SLOWEST
GRACE, SLOWEST = 3 * TIMEOUT, 50_000
TRIES, PAUSES = 3, (0.5, 2.0)  # attempts of one request, and seconds between them
LONGEST_PAUSE = 10.0  # seconds; a server that asks for more is an error at once
PASSING = (429, 500, 502, 503, 504)  # statuses that a second attempt may change
REDIRECTS = (301, 302, 303, 307, 308)
_SECRETS = ("authorization", "cookie")
_NETWORK_ERRORS = (*HfHubHTTPError.__bases__, OSError, ValueError, RuntimeError)
_UNAVAILABLE = "try again later, or check the network"
_LYING = "the server, or a proxy before it, does not behave as the Hub does"


@dataclass(frozen=True)
class Reply:
    """Successful answer to a request."""

    status: int  # 200 or 206
    headers: Mapping[str, str]  # of the last answer, case-insensitive
    first_headers: Mapping[str, str]  # of the endpoint's own answer, before redirects
    url: str  # that answered last
    body: bytes


@dataclass(frozen=True)
class ReadingLimits:
    """Bounds of everything that one client reads."""

    most_bytes: int  # of all answers together
    seconds: float | None  # from the first request to the last; None: no bound


@dataclass(frozen=True)
class _Request:
    """A GET request, as `HubClient.get` describes it."""

    url: str
    where: str
    most: int
    span: tuple[int, int] | None


class _Passing(Exception):
    """A failure that a second attempt may change."""

    def __init__(self, error: HubError, pause: float | None = None) -> None:
        super().__init__(str(error))
        self.error, self.pause = error, pause  # seconds to wait, as the server asks; None if it does not


class HubClient:
    """Client for one repository. Every error is a HubError of one line."""

    def __init__(self, repo: str, limits: ReadingLimits) -> None:
        if huggingface_hub.is_offline_mode():
            problem = "HF_HUB_OFFLINE keeps this process off the Hub"
            raise HubError(problem, "unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE, or give a folder on disk")
        self.limits = limits
        self.endpoint: str = huggingface_hub.constants.ENDPOINT
        self.page = f"{self.public_endpoint}/{repo}"  # where a user accepts the conditions of a gated model
        self.requests = self.bytes_read = 0
        self._header_bytes = 0  # of all answers
        self._counting = threading.Lock()  # headers of several files are read at a time
        self._headers = build_hf_headers(library_name="tiewise", library_version=__version__)
        self._started = time.monotonic()

    def get(self, url: str, where: str, most: int, span: tuple[int, int] | None = None) -> Reply:
        """Return the answer to a GET request of at most `most` bytes.

        Args:
            url: the address.
            where: the repository or its file, for errors.
            most: bytes of the longest acceptable body.
            span: first and last byte of a part of the file; None: all of it.
        """
        for attempt in range(TRIES):
            try:
                return self._answer_in_time(_Request(url, where, most, span))
            except _Passing as failure:
                pause = self._pause(attempt, failure)
                if pause is None:
                    raise failure.error from None
                time.sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    def _pause(self, attempt: int, failure: _Passing) -> float | None:
        """Return the seconds before the next attempt; None if there is none."""
        if attempt + 1 == TRIES:
            return None
        pause = PAUSES[attempt]
        if failure.pause is not None:
            pause = max(pause, failure.pause)
        if pause > LONGEST_PAUSE:
            return None
        return pause

    def _answer_in_time(self, request: _Request) -> Reply:
        """Return the answer to a request. Raises a HubError if it takes too long."""
        limit = TimeLimit.of(GRACE)
        try:
            return call_within(limit, lambda: self._follow(request, limit))
        except OutOfTime:
            remedy = "try again later, or download the files first"
            raise HubError(f"{request.where}: the server sends too slowly", remedy) from None

    def _follow(self, request: _Request, limit: TimeLimit) -> Reply:
        """Send a request and those to which it is redirected."""
        url, where = request.url, request.where
        first_headers: Mapping[str, str] | None = None
        for _ in range(MOST_REDIRECTS + 1):
            with self._answer(url, where, request.span) as answer:
                self._count_headers(answer, where)
                if first_headers is None:
                    first_headers = answer.headers
                if answer.status_code not in REDIRECTS:
                    self._require_success(answer, where)
                    body = self._body(answer, where, request.most, limit)
                    return Reply(answer.status_code, answer.headers, first_headers, url, body)
                url = self._target(url, answer.headers.get("location"), where)
                self._finish(answer, where, limit)
        raise HubError(f"{where}: more than {MOST_REDIRECTS} redirects", _LYING)

    @contextmanager
    def _answer(self, url: str, where: str, span: tuple[int, int] | None) -> Iterator[Any]:
        """Send one request; yield its answer, whose body is not read yet."""
        self._require_time(where)
        with self._counting:
            self.requests += 1
        headers = {"Accept-Encoding": "identity", **self._headers_for(url)}
        if span is not None:
            headers["Range"] = f"bytes={span[0]}-{span[1]}"
        try:
            request = get_session().stream("GET", url, headers=headers, follow_redirects=False, timeout=TIMEOUT)
            with request as answer:
                yield answer
        except (HubError, _Passing):
            raise
        except OfflineModeIsEnabled:
            raise HubError(f"{where}: this process is offline", "give a folder on disk") from None
        except _NETWORK_ERRORS as error:
            if "Timeout" in type(error).__name__:
                problem = f"{where}: {self.public_endpoint} does not answer in {TIMEOUT:.0f} seconds"
                raise HubError(problem, _UNAVAILABLE) from None
            raise _Passing(self._network_error(error, where)) from None

    def _headers_for(self, url: str) -> dict[str, str]:
        """Return the headers of a request: with the token only for the endpoint itself."""
        if _origin(url) == _origin(self.endpoint):
            return dict(self._headers)
        return {name: value for name, value in self._headers.items() if name.lower() not in _SECRETS}

    def _target(self, url: str, location: str | None, where: str) -> str:
        """Return the address of a redirect. A protected connection is never left for an open one."""
        if location is None:
            raise HubError(f"{where}: a redirect without an address", _LYING)
        try:
            target = urljoin(url, location)
            before, after = urlsplit(url).scheme, urlsplit(target).scheme
        except ValueError:
            raise HubError(f"{where}: a redirect to no address", _LYING) from None
        if after not in ("http", "https") or (before == "https" and after == "http"):
            raise HubError(f"{where}: a redirect from {before} to {short(after)}", _LYING)
        return target

    def _finish(self, answer: Any, where: str, limit: TimeLimit) -> None:
        """Read the short body of a redirect, so that the connection can be used again."""
        length = _number(answer.headers.get("content-length"))
        if length is not None and length <= LONGEST_REDIRECT:
            self._body(answer, where, LONGEST_REDIRECT, limit)

    def _body(self, answer: Any, where: str, most: int, limit: TimeLimit) -> bytes:
        """Return the body of an answer, of at most `most` bytes.

        Every piece of it moves the limit.
        """
        encoding = answer.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise HubError(f"{where}: the server compressed its answer ({short(encoding)})", _LYING)
        started = time.monotonic()
        limit.end = started + GRACE
        body = bytearray()
        for piece in answer.iter_raw():
            body += piece
            with self._counting:
                self.bytes_read += len(piece)
            if len(body) > most:
                raise HubError(f"{where}: the server sends more than {most:,} bytes", _LYING)
            self._require_budget(where)
            limit.end = started + GRACE + len(body) / SLOWEST
        return bytes(body)

    def _count_headers(self, answer: Any, where: str) -> None:
        """Count the bytes of an answer's headers, which belong to the bound of all answers."""
        count = sum(len(name) + len(value) for name, value in answer.headers.raw)
        if count > MOST_HEADERS:
            raise HubError(f"{where}: the server sends {count:,} bytes of headers", _LYING)
        with self._counting:
            self._header_bytes += count
        self._require_budget(where)

    def _require_budget(self, where: str) -> None:
        """Raise a HubError once all answers together are too long."""
        if self.bytes_read + self._header_bytes > self.limits.most_bytes:
            problem = f"{where}: more than {format_bytes(self.limits.most_bytes)} were read from this repository"
            raise HubError(problem, "download the files, then check the folder")
        self._require_time(where)

    def _require_time(self, where: str) -> None:
        """Raise a HubError once reading takes too long."""
        seconds = self.limits.seconds
        if seconds is not None and time.monotonic() - self._started > seconds:
            problem = f"{where}: reading this repository takes more than {seconds / 60:.0f} minutes"
            raise HubError(problem, "download the files, then check the folder")

    def _require_success(self, answer: Any, where: str) -> None:
        """Raise the error of an answer with a status other than 200 and 206."""
        status = answer.status_code
        if status in (200, 206):
            return
        error = HubError(*_refusal(status, answer.headers.get("x-error-code"), where, self.page))
        if status in PASSING:
            raise _Passing(error, _number(answer.headers.get("retry-after")))
        raise error

    def _network_error(self, error: BaseException, where: str) -> HubError:
        """Return the error of a request that no complete answer followed."""
        kind = type(error).__name__
        if "Connect" in kind or "Proxy" in kind:
            return HubError(f"{where}: cannot reach {self.public_endpoint}", "check the network, or HF_ENDPOINT")
        message = one_line_message(error).replace(self.endpoint, self.public_endpoint)
        return HubError(f"{where}: the answer broke off ({message})", _UNAVAILABLE)

    @property
    def public_endpoint(self) -> str:
        """Return the address of the Hub, without a name and a password in it."""
        scheme, _, rest = self.endpoint.partition("://")
        return f"{scheme}://{rest.rpartition('@')[2]}"


def _origin(url: str) -> tuple[str, str | None, int | None]:
    """Return scheme, host and port of an address."""
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, parts.hostname, port


def _number(text: str | None) -> float | None:
    """Return the number in a header such as Retry-After; None for another value or no header."""
    if text is None or not text.strip().isdecimal():
        return None
    return float(text)


def _refusal(status: int, code: str | None, where: str, page: str) -> tuple[str, str]:
    """Return problem and remedy of an answer with an error's status.

    Args:
        status: HTTP status.
        code: the Hub's own code of the error; None if it sends none.
        where: the repository or its file.
        page: the repository's page.
    """
    login = "log in with `hf auth login`, or set HF_TOKEN"
    if code == "GatedRepo":
        return f"{where}: the model is gated", f"accept its conditions at {page}, then {login}"
    if code == "RevisionNotFound":
        return f"{where}: the repository has no such revision", "check the name after @"
    if code == "RepoNotFound" or status == 401:
        return f"{where}: no such model, or a private one", f"check the name; for a private model, {login}"
    if status == 403:
        return f"{where}: the Hub denies access", f"{login} with an account that may read it"
    if status == 404:
        return f"{where}: not on the Hub", "check the address"
    if status == 416:
        return f"{where}: the file is shorter than the Hub listed it", "run again: the repository changed"
    if status == 429:
        return f"{where}: the Hub accepts no more requests for now", f"wait some minutes, or {login}"
    return f"{where}: the server answered with status {status}", _UNAVAILABLE
