"""What scripts/demo may be told. Standard library alone: it is asked before anything is installed.

Run as a program it only checks its arguments. Exit status: 0 they are right, 2 they are not, 3 help was given.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HELP_GIVEN = 3


@dataclass(frozen=True)
class Options:
    """The command line of a demo.

    model               a local model folder; None builds SmolLM2-135M-Instruct
    calibration_tokens, windows, max_kl   as in a conversion's settings; None = their defaults
    json                end with one line of JSON on stdout
    keep                leave the services up until a signal
    folder              where everything is kept
    """

    model: Path | None
    calibration_tokens: int | None
    windows: int | None
    max_kl: float | None
    json: bool
    keep: bool
    folder: Path


def parse(arguments: Sequence[str]) -> Options:
    """Raises SystemExit: 2 after a usage message, 0 after --help."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.model is not None:
        given.model = given.model.expanduser().absolute()
        if not (given.model / "config.json").is_file():
            parser.error(f"--model: {given.model} is no model folder: it has no config.json")
    given.folder = given.folder.expanduser().absolute()
    return Options(**vars(given))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/demo",
        allow_abbrev=False,
        description="Convert a language model as a user of the service would, and generate with the result.",
        epilog="Exit status: 0 done, 1 the work failed, 2 wrong usage. Progress goes to stderr, results to stdout.",
    )
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--keep", action="store_true", help="leave the services up until Ctrl-C")
    parser.add_argument("--model", type=Path, metavar="DIR", help="a model folder, instead of SmolLM2-135M-Instruct")
    parser.add_argument("--calibration-tokens", type=int, metavar="N", help="how much text the codec is fitted on")
    parser.add_argument("--windows", type=int, metavar="N", help="windows to validate on, over all domains")
    parser.add_argument("--max-kl", type=float, metavar="X", help="smallest cache within this mean KL, nats a token")
    parser.add_argument(
        "--folder",
        type=Path,
        default=ROOT / ".demo",
        metavar="DIR",
        help="where models, results and logs are kept (default: .demo in the checkout)",
    )
    return parser


def main() -> int:
    try:
        parse(sys.argv[1:])
    except SystemExit as end:
        return HELP_GIVEN if end.code == 0 else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
