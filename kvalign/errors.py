"""Every error kvalign raises on purpose, in one tree; knows nothing of jobs, HTTP or the Hub's client.

KvalignError
|- ConfigInvalid          config_invalid      a setting, or a combination of settings, cannot work
|- DatasetInvalid         dataset_invalid     the text cannot be read or is too short
|- SourceError
|  |- SourceNotFound      source_not_found    no such repo, revision or folder
|  |- SourceForbidden     source_forbidden    it exists, and the account may not read it
|  |- SourceGated         source_gated        its owner asks for terms to be accepted first
|  |- SourceUnsupported   source_unsupported  a sound model that kvalign cannot convert
|  |- SourceInvalid       source_invalid      the files are damaged or contradict each other
|  `- WeightsUnsafe       weights_unsafe      only formats that can run code on loading
|- TargetError
|  |- TargetExists        target_exists       something is there that this job did not make
|  `- TargetForbidden     target_forbidden    the account may not write there
|- HubUnavailable         hub_unavailable     the Hub did not answer, or not sensibly
|- DiskFull               disk_full
|- OutOfMemory            out_of_memory
|- TimeLimit              timeout
|- QualityGate            quality_gate        measured, and not good enough to publish
|- Canceled               canceled            the owner asked for it
|- ArtifactInvalid        source_invalid      a codec folder is damaged or belongs to another model
`- PayloadInvalid         source_invalid      compressed bytes are damaged or belong to another codec
"""

from typing import ClassVar


class KvalignError(Exception):
    """An error with a reason a person can act on.

    code     the contract: one of the error codes of the HTTP API (see worker.jobs.ErrorCode)
    message  the fact and the limit
    remedy   what the reader can do about it
    """

    code: ClassVar[str] = "internal"

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}".strip()


class ConfigInvalid(KvalignError):
    code = "config_invalid"


class DatasetInvalid(KvalignError):
    code = "dataset_invalid"


class SourceError(KvalignError):
    """Something about the model to convert."""


class SourceNotFound(SourceError):
    code = "source_not_found"


class SourceForbidden(SourceError):
    code = "source_forbidden"


class SourceGated(SourceError):
    code = "source_gated"


class SourceUnsupported(SourceError):
    code = "source_unsupported"


class SourceInvalid(SourceError):
    code = "source_invalid"


class WeightsUnsafe(SourceError):
    code = "weights_unsafe"


class TargetError(KvalignError):
    """Something about the place to publish to."""


class TargetExists(TargetError):
    code = "target_exists"


class TargetForbidden(TargetError):
    code = "target_forbidden"


class HubUnavailable(KvalignError):
    code = "hub_unavailable"


class DiskFull(KvalignError):
    code = "disk_full"


class OutOfMemory(KvalignError):
    code = "out_of_memory"


class TimeLimit(KvalignError):
    code = "timeout"


class QualityGate(KvalignError):
    code = "quality_gate"


class Canceled(KvalignError):
    code = "canceled"


class ArtifactInvalid(KvalignError):
    code = "source_invalid"


class PayloadInvalid(KvalignError):
    code = "source_invalid"


def _tree(error: type[KvalignError]) -> list[type[KvalignError]]:
    return [error, *(leaf for branch in error.__subclasses__() for leaf in _tree(branch))]


def from_code(code: str, message: str, remedy: str = "") -> KvalignError:
    """The error of a code that crossed a process boundary; an unknown code becomes KvalignError."""
    for error in _tree(KvalignError):
        if error.code == code:
            return error(message, remedy)
    return KvalignError(message, remedy)
