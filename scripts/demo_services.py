"""The two services of a demo: a Hub of its own with the model in it, and `kvalign serve` that works for it."""

import secrets
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path

from demo_place import Place
from demo_processes import Processes

from devhub.storage import HubStorage

USER = "demo"
READY_WITHIN_S = 120.0
_KVALIGN = str(Path(sys.executable).with_name("kvalign"))


@dataclass(frozen=True)
class Services:
    """Where the services answer, and the token that both take. It is made anew for each run."""

    hub: str
    api: str
    token: str = field(repr=False)


def start_services(place: Place, processes: Processes, model: Path, repo: str) -> Services:
    """Both services, ready. Raises PartFailed.

    model, repo   a local model folder, and the repo that the Hub holds it as
    """
    token = f"hf_{secrets.token_hex(20)}"
    # Not by an option of devhub: others see command lines.
    HubStorage(place.run / "hub").add_user(USER, token)
    devhub = processes.start(
        "devhub", [_KVALIGN, "devhub", "--root", str(place.run / "hub"), "--import", f"{repo}={model}"]
    )
    hub = devhub.announced("devhub listening on ", READY_WITHIN_S)
    # What the first conversion compiles serves the next run, and takes a minute off it.
    (place.run / "service").mkdir()
    place.compiled.mkdir(exist_ok=True)
    (place.run / "service" / "cache").symlink_to(place.compiled)
    serve = processes.start(
        "serve",
        [
            *(_KVALIGN, "serve", "--hub-endpoint", hub),
            *("--data-dir", str(place.run / "service"), "--port", str(_free_port())),
        ],
    )
    return Services(hub, serve.announced("kvalign serving on ", READY_WITHIN_S), token)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
