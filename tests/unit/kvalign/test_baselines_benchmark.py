"""The comparison with the baselines: equal KL by interpolation, windows by seed, and a whole run on a tiny model."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("benchmarks", reason="benchmarks are part of the checkout, not of the package")

from benchmarks.comparison import COMPARED_KLS, domain_classes, ratio_at
from benchmarks.held_out import draw_windows, window_lengths
from benchmarks.rate_distortion import main
from kvalign.text import Document


def test_a_power_law_is_met_exactly() -> None:
    """ratio = 100 KL^0.4 is a straight line in logarithms."""
    points = [(kl, 100 * kl**0.4) for kl in (0.002, 0.02, 0.2)]
    for kl in (0.002, *COMPARED_KLS, 0.2):
        assert ratio_at(points, kl) == pytest.approx(100 * kl**0.4)
        assert ratio_at(points[::-1], kl) == pytest.approx(100 * kl**0.4)


@pytest.mark.parametrize("kl", [0.0019, 0.21])
def test_nothing_is_extrapolated(kl: float) -> None:
    assert ratio_at([(0.002, 8.0), (0.2, 50.0)], kl) is None
    assert ratio_at([], kl) is None


def test_a_setting_that_a_better_one_outdoes_does_not_count() -> None:
    """20x at KL 0.02 is at once smaller and better than 15x at KL 0.05."""
    points = [(0.01, 10.0), (0.05, 15.0), (0.02, 20.0), (0.08, 40.0)]
    assert ratio_at(points, 0.02) == pytest.approx(20.0)
    assert ratio_at(points, 0.04) == pytest.approx(20 * 2**0.5)


def test_domains_are_told_apart_by_the_first_word_of_their_files() -> None:
    classes = domain_classes(["wikitext2-test", "law", "code_web"], ["wikitext2-valid", "code"], None)
    assert classes["overall"] == ["wikitext2-test", "law", "code_web"]
    assert classes["in-domain"] == ["wikitext2-test", "code_web"]
    assert classes["out-of-domain"] == ["law"]
    assert classes["law"] == ["law"]
    assert "in-domain" not in domain_classes(["law"], ["code"], None)
    assert domain_classes(["law"], ["code"], ["law"])["in-domain"] == ["law"]


class Characters:
    """A tokenizer of one token a character."""

    bos_token_id = None
    eos_token_id = None

    def __call__(self, text: str, **options: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) for character in text]}


def test_windows_are_spread_over_the_files_and_picked_by_the_seed() -> None:
    documents = [Document("a", "".join(map(chr, range(1000, 1400)))), Document("b", "y" * 45), Document("b", "z" * 25)]

    def draw(seed: int) -> list[torch.Tensor]:
        found = draw_windows(documents, Characters(), windows=4, prefix=15, continuation=5, seed=seed)
        assert [window.domain for window in found] == ["a", "a", "b", "b"]
        assert all(window.prefix.numel() == 15 and window.continuation.numel() == 5 for window in found)
        return [torch.cat([window.prefix, window.continuation]) for window in found]

    assert all(torch.equal(a, b) for a, b in zip(draw(0), draw(0), strict=True))
    drawn = {int(window[0]) for seed in range(8) for window in draw(seed)[:2]}
    assert len(drawn) > 4
    # A window is one stretch of one document.
    assert all(torch.equal(window, torch.arange(int(window[0]), int(window[0]) + 20)) for window in draw(3)[:2])


def test_prefixes_are_sinks_and_whole_groups() -> None:
    for limit in (100, 256, 1024, 8192):
        prefix, continuation = window_lengths(limit)
        assert (prefix - 4) % 32 == 0
        assert prefix + continuation == min(limit, 1024)
        assert continuation > prefix / 6


def test_a_whole_run(tiny_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = Path(__file__).parents[3] / "kvalign" / "corpus"
    out = tmp_path / "results" / "out.json"
    options = ["--model", str(tiny_folder("llama")), "--json", str(out), "--calibration-tokens", "2048"]
    texts = ["--calibration-text", str(corpus / "calibration" / "encyclopedia.txt"), "--eval-text"]
    texts += [str(corpus / "validation" / f"{name}.txt") for name in ("encyclopedia", "law")]
    monkeypatch.setattr(sys, "argv", ["rate_distortion", *options, *texts, "--windows", "1", "--seed", "1"])
    main()
    result = json.loads(out.read_text())
    assert result["floor_kl"] <= 1e-6
    assert {"hardware", "commit", "versions"} <= set(result["environment"])
    assert str(tmp_path) not in out.read_text()
    rows = result["rows"]
    required = "codec setting ratio kl_mean kl_p99 top1 nll_delta bytes_per_token artifact_bytes domain protocol"
    assert all(set(required.split()) <= set(row) for row in rows)
    assert {row["codec"] for row in rows} == {"kvalign", "kvtc", "kivi", "fp8"}
    for protocol in ("R", "S"):
        for domain in ("encyclopedia", "law"):
            ours = [
                row for row in rows if (row["codec"], row["protocol"], row["domain"]) == ("kvalign", protocol, domain)
            ]
            assert len(ours) >= 6
            assert len({row["artifact_bytes"] for row in ours}) == 1
            fp8 = next(
                row for row in rows if (row["codec"], row["protocol"], row["domain"]) == ("fp8", protocol, domain)
            )
            assert fp8["ratio"] == pytest.approx(2.0, rel=0.02)
            assert fp8["bytes_per_token"] == pytest.approx(64, rel=0.02)
    compared = {(item["protocol"], item["domain"], item["kl"]) for item in result["summary"]}
    names = ("overall", "in-domain", "out-of-domain", "encyclopedia", "law")
    assert compared == {(protocol, name, kl) for protocol in ("R", "S") for name in names for kl in COMPARED_KLS}
