"""The table of several benchmark results: means over seeds, and nothing where a seed is missing."""

from typing import Any

from benchmarks.picture import curves, table


def result(gain: float | None, kl: float = 0.01) -> dict[str, Any]:
    def row(setting: str, ratio: float, kl: float, domain: str) -> dict[str, Any]:
        return {
            "codec": "kvalign",
            "setting": setting,
            "protocol": "R",
            "domain": domain,
            "ratio": ratio,
            "kl_mean": kl,
            "scored_tokens": 100,
        }

    return {
        "setup": {"evaluation": {"domains": {"a": "in-domain", "b": "out-of-domain"}}},
        "summary": [
            {
                "kl": kl,
                "domain": "overall",
                "protocol": "R",
                "ratio_ours": gain and 10 * gain,
                "ratio_kvtc": 10.0,
                "gain": gain,
            }
        ],
        "rows": [
            row("step 1", 10.0, 0.02, "a"),
            row("step 1", 30.0, 0.04, "b"),
            row("step 2", 40.0, 0.01, "a"),
            row("step 3", 60.0, 0.09, "a"),
        ],
    }


def test_gains_are_geometric_means_with_their_extremes() -> None:
    assert table([result(2.0), result(8.0)]).splitlines()[-1] == (
        "| overall | R | 0.01 | 40.0 | 10.0 | 4.00 (2.00 to 8.00) |"
    )


def test_a_gain_that_one_seed_lacks_is_not_told() -> None:
    """The coarsest setting has a KL of 0.09: below it nothing is known of the ratio where ours is missing."""
    assert "not reached" in table([result(2.0), result(None)])


def test_a_curve_that_stays_below_a_kl_bounds_the_gain() -> None:
    assert table([result(None, kl=0.1)]).splitlines()[-1] == (
        "| overall | R | 0.1 | at least 60.0 | 10.0 | at least 6.00 (6.00 to 6.00) |"
    )


def test_points_that_another_beats_are_left_out() -> None:
    """Step 1 over both domains: harmonic mean ratio 15 at KL 0.03, which step 2 beats in both."""
    assert curves(result(2.0), "R") == {"kvalign": [(40.0, 0.01), (60.0, 0.09)]}
    assert curves(result(2.0), "S") == {}
