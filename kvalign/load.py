"""load(repo or folder) -> (model, tokenizer, codec). Reads from the Hub; never writes to it."""

from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from kvalign.artifact import CONFIG_NAME, Artifact, load_artifact, read_config
from kvalign.capture import load_model, load_tokenizer
from kvalign.codec import Codec
from kvalign.errors import HubUnavailable, SourceForbidden, SourceGated, SourceNotFound
from kvalign.resident.interface import register

_REPORT_FILES = ["report.json", "README.md", "figures/*"]
# Data only: no pickles, and no Python.
_MODEL_FILES = ["*.safetensors", "*.json", "*.model", "*.jinja", "merges.txt", "vocab.txt", "LICENSE*", "NOTICE*"]


def load(
    repo_or_folder: str | Path,
    *,
    revision: str | None = None,
    base: str | Path | None = None,
    dtype: torch.dtype = torch.float32,
    token: str | None = None,
    endpoint: str | None = None,
) -> tuple[Any, Any, Codec]:
    """A converted model with its tokenizer and codec, ready for generate.

    repo_or_folder  a Hub repo, or a local folder, of either layout
    revision        branch, tag or commit of the repo
    base            folder or repo of the base model, for layout `codec`; default: the one the artifact names
    dtype           of the model
    token, endpoint   for the Hub; default: those of the environment

    Raises ArtifactInvalid when the codec belongs to another model, SourceError when something cannot be read,
    HubUnavailable when the Hub does not answer.
    """
    folder = fetch(repo_or_folder, revision=revision, token=token, endpoint=endpoint)
    artifact = load_artifact(folder)
    weights = model_folder(folder, artifact, base, token, endpoint)
    artifact.base.check(weights)
    model = load_model(weights, dtype)
    # A generation config may ask for a static or quantized cache, which contradicts the one handed to generate.
    model.generation_config.cache_implementation = None
    register()
    return model, load_tokenizer(weights), artifact.codec(model)


def fetch(
    repo_or_folder: str | Path,
    *,
    revision: str | None = None,
    weights: bool = True,
    report: bool = False,
    token: str | None = None,
    endpoint: str | None = None,
) -> Path:
    """The local folder itself, or the repo's files in the Hub client's cache.

    weights  and tokenizer; without them, what describes the codec, and the report with its figures
    report   the report and its figures as well as the weights
    """
    if Path(repo_or_folder).expanduser().is_dir():
        return Path(repo_or_folder).expanduser()
    patterns = [*(_MODEL_FILES if weights else [CONFIG_NAME]), *(_REPORT_FILES if report or not weights else [])]
    try:
        return Path(
            snapshot_download(
                str(repo_or_folder), revision=revision, allow_patterns=patterns, token=token, endpoint=endpoint
            )
        )
    except GatedRepoError as error:
        raise SourceGated(
            f"{repo_or_folder} is gated.", "Accept its terms on the Hub, and give a token that may read it."
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        raise SourceNotFound(
            f"{repo_or_folder} is neither a local folder nor a Hub repo that this token can see.",
            "Check the name and the revision, or give a token that may read it.",
        ) from error
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        if status in (401, 403):
            raise SourceForbidden(
                f"The Hub refuses to show {repo_or_folder}.", "Give a token that may read it."
            ) from error
        raise HubUnavailable(f"The Hub answered {status} for {repo_or_folder}.", "Try again later.") from error
    except (LocalEntryNotFoundError, OSError) as error:
        raise HubUnavailable(
            f"{repo_or_folder} could not be fetched: {str(error)[:200]}", "Check the network, or name a local folder."
        ) from error


def model_folder(
    folder: Path, artifact: Artifact, base: str | Path | None, token: str | None, endpoint: str | None
) -> Path:
    """Where the base model's weights are: beside the codec (layout full), or at the base's own commit."""
    if base is not None:
        return fetch(base, token=token, endpoint=endpoint)
    if all((folder / name).is_file() for name in artifact.base.weights):
        return folder
    if not artifact.base.commit:
        raise SourceNotFound(
            f"{artifact.base.repo} was converted from a folder that is not beside the codec.",
            "Name that folder with base (--base).",
        )
    return fetch(artifact.base.repo, revision=artifact.base.commit, token=token, endpoint=endpoint)


def describe(repo_or_folder: str | Path, **where: Any) -> tuple[dict[str, Any], Path]:
    """kvalign_config.json of a converted model, and the folder it was read from; fetches no weights."""
    folder = fetch(repo_or_folder, weights=False, **where)
    return read_config(folder), folder
