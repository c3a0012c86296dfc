"""What preflights found out about sources, kept so that a flood of submissions is not a flood of Hub requests.

Where a revision points and who may read it is believed for a few seconds, what a commit holds for minutes, and both
only of sources that pass. Must hold no rule about sources, and tells nothing to the bearer of another token.
"""

from dataclasses import dataclass

from kvalign.config import Source
from service.memory import ShortMemory
from worker.hub import Hub, SourceInfo
from worker.preflight import Lookup, ModelFacts

_MODEL_TTL_S = 600.0
_CAPACITY = 512
_LARGEST_LISTING = 500  # files; a repo with more is asked about each time rather than held in memory


class KnownSources:
    """source_ttl_s  how long a revision and the right to read it are believed; 0 = never"""

    def __init__(self, *, source_ttl_s: float) -> None:
        self._sources = ShortMemory[SourceInfo](ttl_s=source_ttl_s, capacity=_CAPACITY)
        self._models = ShortMemory[ModelFacts](ttl_s=_MODEL_TTL_S, capacity=_CAPACITY)

    def lookup(self, token: str) -> Lookup:
        """For preflight, on behalf of a token."""
        return _Lookup(token, self._sources, self._models)


@dataclass(frozen=True)
class _Lookup(Lookup):
    _token: str
    _sources: ShortMemory[SourceInfo]
    _models: ShortMemory[ModelFacts]

    def source(self, hub: Hub, source: Source) -> SourceInfo:
        return self._sources.recall(
            self._token,
            f"{source.repo}@{source.revision}",
            lambda: super(_Lookup, self).source(hub, source),
            worth_keeping=lambda found: len(found.files) <= _LARGEST_LISTING,
        )

    def model(self, hub: Hub, source: SourceInfo) -> ModelFacts:
        return self._models.recall(
            self._token,
            f"{source.repo}@{source.commit}",
            lambda: super(_Lookup, self).model(hub, source),
            worth_keeping=lambda facts: all(check.ok for check in facts.checks),
        )
