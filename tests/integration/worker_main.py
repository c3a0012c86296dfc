"""A real `kvalign worker` process, save that its converting child is a stand-in: CHILD, or fake_child.py.

TEST_HUB_PATIENCE_S shortens the minute that it waits for a Hub that says nothing.

Usage: python worker_main.py CONTROL_FOLDER [CONCURRENCY [CHILD]], with the settings in the environment.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

from worker import hub_client, hub_download
from worker.pipeline import Tools
from worker.process import Confinement
from worker.runner import Runner
from worker.settings import WorkerSettings
from worker.tasks import serve

CHILD = Path(__file__).with_name("fake_child.py")


def main() -> int:
    settings = WorkerSettings.load()
    if patience_s := float(os.environ.get("TEST_HUB_PATIENCE_S", "0")):
        hub_client._TIMEOUTS_S.update(read=patience_s, write=patience_s)
        hub_download._STALL_S = patience_s
    control, *given = sys.argv[1:]
    concurrency = int(given[0]) if given else 1
    child = given[1] if len(given) > 1 else str(CHILD)
    tools = Tools.of(settings, concurrency)
    confinement = Confinement(
        settings.child_memory_bytes or 2**31, min(settings.child_file_bytes, 2**30), 1, settings.child_stall_s
    )
    runner = Runner([sys.executable, child, control], confinement, tools.workspaces.cache)
    return serve(settings, replace(tools, runner=runner), concurrency=concurrency, log_level="info")


if __name__ == "__main__":
    sys.exit(main())
