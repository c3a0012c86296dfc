"""A real `kvalign worker` process, save that its converting child is a stand-in: CHILD, or fake_child.py.

Usage: python worker_main.py CONTROL_FOLDER [CHILD], with the settings in the environment.
"""

import sys
from dataclasses import replace
from pathlib import Path

from worker.pipeline import Tools
from worker.process import Confinement
from worker.runner import Runner
from worker.settings import WorkerSettings
from worker.tasks import serve

CHILD = Path(__file__).with_name("fake_child.py")


def main() -> int:
    settings = WorkerSettings.load()
    tools = Tools.of(settings, 1)
    child = sys.argv[2] if len(sys.argv) > 2 else str(CHILD)
    command = [sys.executable, child, sys.argv[1]]
    runner = Runner(command, Confinement(2**31, 2**30, 1), tools.workspaces.cache)
    return serve(settings, replace(tools, runner=runner), concurrency=1, log_level="info")


if __name__ == "__main__":
    sys.exit(main())
