"""What was scored, as rows and as gains at equal KL. Numbers in, plain data out; runs no model."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.fitting import SINK_TOKENS
from kvalign import accounting
from kvalign.evaluate.metrics import summarise
from kvalign.evaluate.protocol import CacheCoder, Trial
from kvalign.geometry import Geometry

COMPARED_KLS = (0.01, 0.03, 0.08)
PROTOCOLS = ("R", "S")
_CACHE_LENGTHS = {"1k": 1024, "2k": 2048, "8k": 8192}
_SPREADS = {"10k": 10_000, "1m": 1_000_000}

UNITS = {
    "ratio": "bf16 bytes of the coded tokens / bytes they take, side information included, sinks not",
    "cache_ratio_*": "bf16 bytes of a cache of so many tokens / its bytes, sinks included",
    "spread_ratio_*": "as cache_ratio at 8k, with the artifact spread over so many cached tokens",
    "kl_*": "nats a token, KL(uncompressed || codec); kl_low and kl_high: 95 % bootstrap over windows",
    "top1": "share of tokens",
    "total_variation": "0 to 1",
    "nll_delta": "nats a token",
    "bytes_per_token": "bytes",
    "artifact_bytes": "bytes",
    "gain": "ratio_ours / ratio_kvtc at equal KL; null where one curve does not reach that KL",
}


@dataclass(frozen=True)
class Contender:
    """One coder at one setting. artifact_bytes: what decoding needs besides the payload."""

    codec: str
    setting: str
    coder: CacheCoder
    artifact_bytes: int


@dataclass(frozen=True)
class Scored:
    """One contender on one window by one protocol."""

    contender: Contender
    protocol: str
    trial: Trial


def rows(scored: Sequence[Scored], domains: Sequence[str], geometry: Geometry) -> list[dict[str, Any]]:
    """One row for each coder, setting, protocol and domain."""
    return [
        _row(contender, protocol, domain, geometry, trials)
        for contender in _contenders(scored)
        for protocol in PROTOCOLS
        for domain in domains
        if (trials := _trials(scored, contender, protocol, [domain]))
    ]


def _row(
    contender: Contender, protocol: str, domain: str, geometry: Geometry, trials: Sequence[Trial]
) -> dict[str, Any]:
    quality = summarise([trial.divergence for trial in trials])
    sizes = accounting.merged([trial.sizes for trial in trials])
    ratio = accounting.coded_ratio(geometry, sizes)

    def projected(tokens: int, artifact_share: float = 0.0) -> float:
        found = accounting.projected_cache_ratio(geometry, ratio, tokens, SINK_TOKENS, artifact_share)
        return round(found, 4)

    longest = max(_CACHE_LENGTHS.values())
    return {
        "codec": contender.codec,
        "setting": contender.setting,
        "protocol": protocol,
        "domain": domain,
        "ratio": round(ratio, 4),
        "kl_mean": quality.kl_mean,
        "kl_low": quality.kl_low,
        "kl_high": quality.kl_high,
        "kl_p99": quality.kl_p99,
        "kl_max": quality.kl_max,
        "top1": quality.top1,
        "total_variation": quality.total_variation,
        "nll_delta": quality.nll_delta,
        "bytes_per_token": round((sizes.coded + sizes.side_info) / sizes.body_tokens, 2),
        "artifact_bytes": contender.artifact_bytes,
        **{f"cache_ratio_{name}": projected(tokens) for name, tokens in _CACHE_LENGTHS.items()},
        **{
            f"spread_ratio_{name}": projected(longest, contender.artifact_bytes * longest / tokens)
            for name, tokens in _SPREADS.items()
        },
        "scored_tokens": quality.tokens,
        "windows": quality.windows,
    }


def summary(scored: Sequence[Scored], classes: dict[str, list[str]], geometry: Geometry) -> list[dict[str, Any]]:
    """Gain over KVTC at equal KL, by protocol, for each class of domains."""
    found = []
    for protocol in PROTOCOLS:
        for name, domains in classes.items():
            ours = curve(scored, "kvalign", protocol, domains, geometry)
            kvtc = curve(scored, "kvtc", protocol, domains, geometry)
            for kl in COMPARED_KLS:
                ratios = ratio_at(ours, kl), ratio_at(kvtc, kl)
                found.append(
                    {
                        "kl": kl,
                        "domain": name,
                        "protocol": protocol,
                        "ratio_ours": ratios[0],
                        "ratio_kvtc": ratios[1],
                        "gain": ratios[0] / ratios[1] if ratios[0] and ratios[1] else None,
                    }
                )
    return found


def curve(
    scored: Sequence[Scored], codec: str, protocol: str, domains: Sequence[str], geometry: Geometry
) -> list[tuple[float, float]]:
    """(KL, ratio) of each setting over all windows of some domains together."""
    points = []
    for contender in _contenders(scored):
        trials = _trials(scored, contender, protocol, domains)
        if contender.codec == codec and trials:
            sizes = accounting.merged([trial.sizes for trial in trials])
            kl = summarise([trial.divergence for trial in trials]).kl_mean
            points.append((kl, accounting.coded_ratio(geometry, sizes)))
    return points


def ratio_at(points: Sequence[tuple[float, float]], kl: float) -> float | None:
    """Ratio at a KL, by straight lines of log ratio over log KL; None outside the points: nothing is extrapolated.

    >>> ratio_at([(0.01, 10.0), (0.04, 20.0)], 0.02)
    14.142135623730951
    >>> ratio_at([(0.01, 10.0), (0.04, 20.0)], 0.05) is None
    True
    """
    ordered = sorted((ratio, max(found, 1e-12)) for found, ratio in points)
    # A larger ratio that happens to score better than a smaller one makes the smaller one useless.
    kls = np.minimum.accumulate([found for _, found in ordered][::-1])[::-1]
    if not len(kls) or not kls[0] <= kl <= kls[-1]:
        return None
    return float(np.exp(np.interp(np.log(kl), np.log(kls), np.log([ratio for ratio, _ in ordered]))))


def domain_classes(
    domains: Sequence[str], calibrated_on: Sequence[str], in_domain: Sequence[str] | None
) -> dict[str, list[str]]:
    """Domains by class: overall, in-domain, out-of-domain (those that are not empty), and each by itself.

    in_domain  stems that count as calibrated on; None: those that share the first word of a calibration file

    >>> domain_classes(["wikitext2-test", "law"], ["wikitext2-valid", "code"], None)["in-domain"]
    ['wikitext2-test']
    """
    known = {_first_word(name) for name in calibrated_on}
    inside = [name for name in domains if (_first_word(name) in known if in_domain is None else name in in_domain)]
    classes = {
        "overall": list(domains),
        "in-domain": inside,
        "out-of-domain": [name for name in domains if name not in inside],
        **{name: [name] for name in domains},
    }
    return {name: members for name, members in classes.items() if members}


def class_of(domain: str, classes: dict[str, list[str]]) -> str:
    return "in-domain" if domain in classes.get("in-domain", []) else "out-of-domain"


def _first_word(stem: str) -> str:
    letters = re.match(r"[a-z]+", stem.lower())
    return letters[0] if letters else stem


def _contenders(scored: Sequence[Scored]) -> list[Contender]:
    return list(dict.fromkeys(item.contender for item in scored))


def _trials(scored: Sequence[Scored], contender: Contender, protocol: str, domains: Sequence[str]) -> list[Trial]:
    return [
        item.trial
        for item in scored
        if item.contender is contender and item.protocol == protocol and item.trial.domain in domains
    ]
