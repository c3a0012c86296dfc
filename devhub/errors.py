"""Every refusal devhub can answer with, each with its HTTP status and X-Error-Code; knows no request.

The client tells "no such repo" from "no such file" by X-Error-Code alone, so the codes are its contract.
"""

from typing import ClassVar


class HubError(Exception):
    """A refusal: the message goes to the client as X-Error-Message and in the body."""

    status: ClassVar[int] = 400
    code: ClassVar[str | None] = None

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class BadRequest(HubError):
    """The request contradicts itself or asks for something that cannot be."""


class InvalidName(BadRequest):
    """A repo, branch or tag name that no repo, branch or tag can have."""


class InvalidToken(HubError):
    """A token was sent and nobody owns it. The client tells it from "no repo" by this sentence."""

    status = 401

    def __init__(self) -> None:
        super().__init__("Invalid credentials in Authorization header")


class LoginNeeded(HubError):
    status = 401


class Forbidden(HubError):
    status = 403


class RepoNotFound(HubError):
    status = 404
    code = "RepoNotFound"


class RepoHidden(RepoNotFound):
    """Missing or private, asked without a token: the answer must not tell which."""

    status = 401


class RevisionNotFound(HubError):
    status = 404
    code = "RevisionNotFound"


class EntryNotFound(HubError):
    """No such path. `commit` is the one that was looked at, so that clients can remember the absence."""

    status = 404
    code = "EntryNotFound"

    def __init__(self, message: str, commit: str | None = None) -> None:
        super().__init__(message)
        self.commit = commit


class GatedRepo(HubError):
    status = 403
    code = "GatedRepo"


class GatedAnonymous(GatedRepo):
    status = 401


class NotFound(HubError):
    status = 404


class Conflict(HubError):
    """It exists already. `url`, where known, is what the client takes as the answer under exist_ok."""

    status = 409

    def __init__(self, message: str, url_path: str | None = None) -> None:
        super().__init__(message)
        self.url_path = url_path


class StaleParent(HubError):
    status = 412


class TooLarge(HubError):
    status = 413


class NotSupported(HubError):
    """The real Hub can, devhub cannot, and pretending would be worse. The client does not retry a 501."""

    status = 501
