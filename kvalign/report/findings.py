"""What the report stage measures beside the codec's quality: heads, other codecs, speed. Draws nothing."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvalign.align.basis import sensitivity_shares
from kvalign.artifact import Artifact
from kvalign.capture import Captured, capture
from kvalign.evaluate.baselines import KvtcFit, fit_kvtc
from kvalign.evaluate.comparison import PUBLISHED_KVTC_RATIO, BaselineResult, measure_baselines
from kvalign.evaluate.heads import HeadPictures, measure_heads
from kvalign.evaluate.protocol import PreparedWindow
from kvalign.evaluate.speed import SpeedResult, measure_speed
from kvalign.geometry import KINDS, Kind
from kvalign.statistics import Statistics

PARTS = ("the heads", "fitting KVTC", "other codecs", "speed")
# Of held-out text.
HEAD_TOKENS = 4096
_KVTC_LIMIT = 8192  # numbers of a token of one kind: a basis over more takes hours
_FILE = "findings.json"
_TENSORS = "findings.safetensors"


@dataclass(frozen=True)
class Findings:
    """Output of the report stage's measurements.

    heads        pictures of keys and values
    sensitivity  [L] for each kind: share of each layer in what errors of its own variance would cost, all together 1;
                 empty where calibration asked no gradients
    """

    heads: dict[Kind, HeadPictures]
    sensitivity: dict[Kind, Tensor]
    baselines: tuple[BaselineResult, ...]
    speed: SpeedResult

    def save(self, folder: Path) -> None:
        tensors = {f"sensitivity/{kind}": share.contiguous() for kind, share in self.sensitivity.items()}
        for kind, pictures in self.heads.items():
            for name in ("before", "after", "absolute", "variance"):
                tensors[f"{name}/{kind}"] = getattr(pictures, name).contiguous()
        save_file(tensors, folder / _TENSORS)
        plain = {
            "left_out": {kind: pictures.left_out for kind, pictures in self.heads.items()},
            "sensitivity": list(self.sensitivity),
            "baselines": [asdict(item) for item in self.baselines],
            "speed": asdict(self.speed),
        }
        (folder / _FILE).write_text(json.dumps(plain))

    @classmethod
    def load(cls, folder: Path) -> "Findings":
        plain: dict[str, Any] = json.loads((folder / _FILE).read_text())
        tensors = load_file(folder / _TENSORS)
        names = ("before", "after", "absolute", "variance")
        return cls(
            heads={
                kind: HeadPictures(**{name: tensors[f"{name}/{kind}"] for name in names}, left_out=left_out)
                for kind, left_out in plain["left_out"].items()
            },
            sensitivity={kind: tensors[f"sensitivity/{kind}"] for kind in plain["sensitivity"]},
            baselines=tuple(BaselineResult.from_json(item) for item in plain["baselines"]),
            speed=SpeedResult(**plain["speed"]),
        )


def examine(
    model: Any,
    artifact: Artifact,
    statistics: Statistics,
    *,
    prepared: Sequence[PreparedWindow],
    kept_aside: Sequence[Captured],
    ratio: float,
    on_progress: Callable[[str], None] = lambda what: None,
) -> Findings:
    """Measure it all.

    prepared     the windows that the codec was judged on
    kept_aside   what calibration sequences leave that no basis has seen, to fit rotations and KVTC on
    ratio        of coded tokens, that the codec has at its recommended step
    on_progress  called with the part of PARTS that is worked on, again and again

    Cost: see measure_heads, fit_kvtc, measure_baselines, measure_speed.
    """
    on_progress("the heads")
    heads = pictured_heads(model, artifact, kept_aside, prepared)
    on_progress("fitting KVTC")
    kvtc = _fitted_kvtc(artifact, statistics, kept_aside, ratio)
    baselines = measure_baselines(
        model,
        artifact.shape,
        prepared,
        kvtc,
        ratio=ratio,
        sink_tokens=artifact.sink_tokens,
        recent_tokens=artifact.recent_tokens,
        on_window=lambda: on_progress("other codecs"),
    )
    on_progress("speed")
    return Findings(
        heads,
        sensitivity_shares(statistics),
        tuple(baselines),
        measure_speed(model, artifact.codec(model), prepared[0]),
    )


def pictured_heads(
    model: Any, artifact: Artifact, kept_aside: Sequence[Captured], prepared: Sequence[PreparedWindow]
) -> dict[Kind, HeadPictures]:
    """As a report shows them: fitted on calibration text, measured on windows of every domain."""
    # Every second window first: those of one domain follow each other.
    held_out = [torch.cat([w.window.prefix, w.window.continuation]) for w in (*prepared[::2], *prepared[1::2])]
    return measure_heads(
        artifact.shape.geometry,
        lambda: kept_aside,
        lambda: capture(model, artifact.shape, iter(up_to(held_out, HEAD_TOKENS))),
        sink_tokens=artifact.sink_tokens,
    )


def kvtc_fits(artifact: Artifact) -> bool:
    """Whether one basis over the whole cache of each kind was summed, and is narrow enough to fit."""
    geometry = artifact.shape.geometry
    one_each = len(artifact.groups) == len(KINDS)
    return one_each and max(geometry.width(kind) for kind in KINDS) <= _KVTC_LIMIT


def up_to(sequences: Sequence[Tensor], tokens: int) -> list[Tensor]:
    """The first sequences that hold so many tokens together; at least one."""
    found: list[Tensor] = []
    for sequence in sequences:
        if found and sum(map(len, found)) + len(sequence) > tokens:
            break
        found.append(sequence)
    return found


def _fitted_kvtc(
    artifact: Artifact, statistics: Statistics, kept_aside: Sequence[Captured], ratio: float
) -> KvtcFit | None:
    if not kvtc_fits(artifact):
        return None
    return fit_kvtc(
        statistics.whole(),
        artifact.shape,
        kept_aside,
        sink_tokens=artifact.sink_tokens,
        smallest_ratio=min(PUBLISHED_KVTC_RATIO, ratio / 2),
    )
