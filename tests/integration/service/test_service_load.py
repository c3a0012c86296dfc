"""The load benchmark runs and writes what it promises; how quick the service is, it says itself."""

import json
import subprocess
import sys
from pathlib import Path

from service_harness import ROOT, environment


def test_the_benchmark_measures_everything(tmp_path: Path) -> None:
    out = tmp_path / "service.json"
    command = [sys.executable, "-m", "benchmarks.service", "--quick", "--database", "sqlite", "--json", str(out)]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True, timeout=300)
    result = json.loads(out.read_text())
    assert result["hardware"]["usable_cores"] >= 1
    measured = result["databases"]["sqlite"]
    assert measured["submit"]["per_s"] > 0
    assert measured["submit"]["refused"] == 0, measured["submit"]
    assert measured["list"]["p95_ms"] > 0
    assert measured["get"]["p95_ms"] > 0
    streams = measured["streams"]
    assert (streams["open"], streams["lost_events"], streams["doubled_events"]) == (20, 0, 0), streams
    assert streams["events"] > 100
    # Hundreds of megabytes more with torch: its absence is what these bounds are about.
    assert 0 < measured["memory"]["api_mb"] < 250
    assert 0 < measured["memory"]["worker_mb"] < 250
