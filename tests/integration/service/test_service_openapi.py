"""schemathesis against a running API: what /openapi.json says and what the API does are the same, also for nonsense.

Requests are made up from the document, valid ones and broken ones, with a seed; every check that schemathesis has
judges the answers. positive_data_acceptance alone leaves out the routes whose answer depends on the Hub or on name
servers, which no document can tell: a source that does not exist is refused with 422 however well its name is formed.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from service_harness import ALICE, ROOT, Api, DevHub, config, environment, start_api, stop_api

from worker.jobs import JobResult
from worker.leases import Leases
from worker.sweeper import seen

RESULT = JobResult("alice/made", "1" * 40, "http://hub/alice/made", 12.5, 0.01, 0.97)
EXAMPLES = "5"
SETTINGS = """
[parameters]
"path.job_id" = "{job_id}"
"path.file" = "report.json"

[[operations]]
include-path = ["/v1/jobs", "/v1/preflight", "/v1/jobs/{{job_id}}/webhook"]
include-method = ["POST", "PUT"]
checks.positive_data_acceptance.enabled = false
"""


def test_the_document_and_the_api_agree(tmp_path: Path, service_hub: DevHub, service_redis: str) -> None:
    no_limits = dict.fromkeys(("SUBMISSIONS_PER_MINUTE", "READS_PER_MINUTE", "FAILED_LOGINS_PER_MINUTE"), "0")
    api = start_api(
        tmp_path,
        KVALIGN_HUB_ENDPOINT=service_hub.url,
        KVALIGN_REDIS_URL=service_redis,
        **{f"KVALIGN_{name}": value for name, value in no_limits.items()},
        KVALIGN_WORKER_SEEN_WITHIN_S="600",
    )
    try:
        seen(api.store, "test")
        (tmp_path / "schemathesis.toml").write_text(SETTINGS.format(job_id=_succeeded_job(api)))
        done = _schemathesis(api, tmp_path)
    finally:
        stop_api(api)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
    tested = re.search(r"Selected: (\d+)/\1\s+Tested: \1\b", done.stdout)
    assert tested, done.stdout[-2_000:]


def _succeeded_job(api: Api) -> str:
    """A job that no request changes: it can be neither canceled nor retried."""
    job = api.store.submit("alice", config("alice/made"), source_commit="0" * 40, token="none").job
    lease = Leases(api.store, lease_s=60, running_limit=9).claim("test")
    assert lease is not None
    lease.save_report_file("report.json", b"{}")
    lease.succeed(RESULT)
    return job.id


def _schemathesis(api: Api, folder: Path) -> subprocess.CompletedProcess[str]:
    words = ["--config-file", "schemathesis.toml", "run", f"{api.url}/openapi.json", "--no-color"]
    words += ["--phases", "coverage,fuzzing", "--max-examples", EXAMPLES, "--seed", "7"]
    words += ["--generation-database", "none", "--request-timeout", "30", "--suppress-health-check", "all"]
    words += ["--header", f"Authorization: Bearer {ALICE}"]
    code = "from schemathesis.cli import schemathesis; schemathesis()"
    kept = {**environment(), "NO_PROXY": "127.0.0.1", "COLUMNS": "160", "PYTHONPATH": os.fspath(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=folder,
        env=kept,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
