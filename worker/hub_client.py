"""The Hub's client for one token: xet and local tokens off, waits bounded, its errors turned into ours.

With its siblings worker.hub*, the only user of huggingface_hub. Must not know jobs or torch.
"""

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import httpx2
from huggingface_hub import HfApi, constants, set_client_factory
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # exported lazily
    build_hf_headers,
    parse_ratelimit_headers,
)

from kvalign.errors import (
    DatasetInvalid,
    HubUnavailable,
    KvalignError,
    SourceForbidden,
    SourceGated,
    SourceNotFound,
    TargetForbidden,
)

# Set as constants, because the environment is read when huggingface_hub is first imported by anyone.
constants.HF_HUB_DISABLE_XET = True
constants.HF_HUB_DISABLE_IMPLICIT_TOKEN = True
constants.HF_HUB_DISABLE_PROGRESS_BARS = True

INFO_TIMEOUT_S = 60.0  # the client takes None for no limit at all
RETRY_PAUSES_S = (0.5, 1.0, 2.0, 4.0)

_TIMEOUTS_S = {"connect": 10.0, "read": 60.0, "write": 60.0, "pool": 10.0}
_LONGEST_WAIT_S = 60
_TRANSIENT = {408, 425, 429, 500, 502, 503, 504}
_TOKEN = re.compile(r"[\x21-\x7e]{1,4096}")


T = TypeVar("T")


class TokenInvalid(SourceForbidden):
    """The Hub does not know the token."""


@dataclass(frozen=True)
class Subject:
    """What a request is about: it decides which error a refusal becomes."""

    kind: str
    name: str
    not_found: type[KvalignError]
    forbidden: type[KvalignError]
    gated: type[KvalignError]
    token: type[KvalignError] = TokenInvalid

    def __str__(self) -> str:
        return f"{self.kind} {self.name}".strip()

    @property
    def page(self) -> str:
        """Path of its page on the Hub."""
        return f"datasets/{self.name}" if self.kind == "dataset" else self.name


def source_subject(repo: str) -> Subject:
    return Subject("model", repo, SourceNotFound, SourceForbidden, SourceGated)


def dataset_subject(repo: str) -> Subject:
    return Subject("dataset", repo, DatasetInvalid, DatasetInvalid, DatasetInvalid)


def target_subject(repo: str) -> Subject:
    return Subject("target", repo, TargetForbidden, TargetForbidden, TargetForbidden, TargetForbidden)


CLIENT_ERRORS = (httpx2.HTTPError, EntryNotFoundError, HFValidationError, json.JSONDecodeError)
"""What the client raises for an answer, or for none; HFValidationError for a name that cannot be."""

ACCOUNT = Subject("account", "", TokenInvalid, TokenInvalid, TokenInvalid)


class HubClient:
    """Requests with one token, or with none: never with one found on this machine.

    pauses_s  waits between tries of one request; their number bounds the tries
    """

    def __init__(self, endpoint: str, token: str, pauses_s: tuple[float, ...] = RETRY_PAUSES_S) -> None:
        if token and not _TOKEN.fullmatch(token):
            raise TokenInvalid("The token holds characters that no Hub token has.", _NEW_TOKEN)
        self.endpoint = endpoint.rstrip("/")
        self.has_token = bool(token)
        self.pauses_s = pauses_s
        self.api = HfApi(endpoint=self.endpoint, token=token or False)
        self._token = token

    @property
    def headers(self) -> dict[str, str]:
        """Headers of a request by hand; they hold the token, so they are for the session alone."""
        return build_hf_headers(token=self._token or False)

    def ask(self, subject: Subject, request: Callable[[], T]) -> T:
        """Send a request, again after transient failures; raises our errors only."""
        pauses = iter(self.pauses_s)
        while True:
            try:
                return request()
            except CLIENT_ERRORS as error:
                pause_s = next(pauses, None)
                if pause_s is None or not is_transient(error):
                    raise self.translated(error, subject) from None
                time.sleep(max(pause_s, asked_wait_s(error)))

    def translated(self, error: Exception, subject: Subject) -> KvalignError:
        """Our error for one of the client's. Its text never holds the token."""
        if isinstance(error, HFValidationError):
            return subject.not_found(f"The {subject} has a name that no repo can have.", "Correct the name.")
        if not isinstance(error, HfHubHTTPError):
            return HubUnavailable(
                f"The Hub at {self.endpoint} did not answer sensibly ({type(error).__name__}).", _TRY_LATER
            )
        said = self._said(error)
        status = error.response.status_code
        if isinstance(error, GatedRepoError):
            return subject.gated(
                f"The {subject} is gated, and this account has not been let in.",
                f"Accept its terms at {self.endpoint}/{subject.page} and try again.",
            )
        if isinstance(error, RevisionNotFoundError):
            return subject.not_found(f"The {subject} has no such revision.", "Name a branch, tag or commit.")
        if isinstance(error, EntryNotFoundError):
            return subject.not_found(f"The {subject} lacks a file{said}.", "Choose another revision.")
        if isinstance(error, RepositoryNotFoundError) or status == 404:
            return subject.not_found(
                f"The {subject} is not on the Hub, or this account may not see it.",
                "Check the name, and that the token may read it.",
            )
        if status == 401:
            return subject.token("The Hub does not accept the token.", _NEW_TOKEN)
        if status in _TRANSIENT or status >= 500:
            return HubUnavailable(f"The Hub answered {status} about {subject}{said}.", _TRY_LATER)
        return subject.forbidden(
            f"The Hub refuses access to the {subject} ({status}){said}.", "Check what the token may do there."
        )

    def _said(self, error: HfHubHTTPError) -> str:
        """The server's own words, as one short clause."""
        words = " ".join((error.server_message or "").split())
        if self._token:
            words = words.replace(self._token, "[token]")
        return f": {words[:300].rstrip('.')}" if words else ""


_NEW_TOKEN = "Send a valid Hub access token; a failed job goes on where it was when it is retried with one."  # noqa: S105  advice, not a secret
_TRY_LATER = "Try again later; finished work is kept."


def is_transient(error: Exception) -> bool:
    """Whether the same request may succeed a moment later."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in _TRANSIENT
    return isinstance(error, httpx2.TransportError | json.JSONDecodeError)


def sensible(read: Callable[[], T]) -> T:
    """Read an answer of the Hub; what it lacks is the Hub's fault. Raises HubUnavailable."""
    try:
        return read()
    except KvalignError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise HubUnavailable(
            f"The Hub's answer cannot be read ({type(error).__name__}: {str(error)[:100]}).", _TRY_LATER
        ) from None


def wait(seconds: float, while_waiting: Callable[[], None]) -> None:
    """Sleep in short naps, calling `while_waiting` before each."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        while_waiting()
        time.sleep(min(left, 0.5))


def asked_wait_s(error: Exception) -> float:
    """Seconds that the server asks to wait before the next try; 0 when it does not say."""
    response = getattr(error, "response", None)
    return _wait_in_headers(response) if isinstance(response, httpx2.Response) else 0.0


def _wait_in_headers(response: httpx2.Response) -> float:
    limit = parse_ratelimit_headers(response.headers)
    if limit is not None and limit.remaining == 0:
        return float(limit.reset_in_seconds)
    asked = response.headers.get("retry-after", "").strip()
    return float(asked) if asked.isdigit() and len(asked) < 10 else 0.0


def _bound_the_time(request: httpx2.Request) -> None:
    """Give every request a time limit: many of the client's calls ask for none."""
    asked = request.extensions.get("timeout") or {}
    bounded = {kind: asked.get(kind) or default for kind, default in _TIMEOUTS_S.items()}
    request.extensions = {**request.extensions, "timeout": bounded}


def _refuse_a_long_wait(response: httpx2.Response) -> None:
    """Fail at once where the client would sleep for as long as a server says."""
    if response.status_code in _TRANSIENT and (seconds := _wait_in_headers(response)) > _LONGEST_WAIT_S:
        raise HubUnavailable(
            f"The Hub answered {response.status_code} and asks to wait {seconds:.0f} s; "
            f"the limit is {_LONGEST_WAIT_S} s.",
            _TRY_LATER,
        )


set_client_factory(
    lambda: httpx2.Client(
        event_hooks={"request": [_bound_the_time], "response": [_refuse_a_long_wait]}, follow_redirects=True
    )
)
