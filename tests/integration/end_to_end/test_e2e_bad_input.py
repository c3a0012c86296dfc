"""Whatever cannot work ends with a code and a remedy: at the request where that can be known, early where not.

Nothing of it is published, and nothing is left behind.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import e2e_models
import pytest
from e2e_models import damaged
from e2e_services import ADA, ADA_READS, BEN, FAILED_KEPT_S, STAGES, Json, Services, conversion, wait_for

DAMAGES = {
    "pickles": e2e_models.only_pickles,
    "remote-code": e2e_models.remote_code,
    "encoder": e2e_models.encoder,
    "recurrent": e2e_models.recurrent,
    "broken-config": e2e_models.broken_config,
    "truncated": e2e_models.truncated_weights,
    "missing-layer": e2e_models.missing_layer,
    "no-tokenizer": e2e_models.no_tokenizer,
    "missing-tensor": e2e_models.missing_tensor,
    "not-a-number": e2e_models.not_a_number,
    "broken-tokenizer": e2e_models.broken_tokenizer,
}


@pytest.fixture(scope="module")
def stocked(all_services: Services, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Services:
    """The Hub with what cannot be converted, ada's each."""
    folder, sound = tmp_path_factory.mktemp("damaged"), models["llama"]
    for name, damage in DAMAGES.items():
        all_services.put_model(f"ada/{name}", damaged(sound, damage, folder / name))
    all_services.put_model("ada/private", sound, private=True)
    all_services.put_model("ada/gated", sound, gated="manual")
    all_services.put_dataset("ada/pictures", {"cat.png": b"\x89PNG"})
    all_services.put_dataset("ada/numbers", {"rows.jsonl": b'{"count": 1}\n' * 50})
    all_services.put_dataset("ada/short", {"rows.jsonl": json.dumps({"text": "Not much. " * 20}).encode()})
    all_services.running_worker()
    return all_services


@dataclass(frozen=True)
class Refusal:
    """A request, whose it is, and the answer that it must get; `says` is a word of the answer."""

    body: Json
    status: int
    code: str
    says: str
    token: str = BEN


def of_source(name: str, status: int, code: str, says: str) -> Refusal:
    return Refusal(conversion(f"ada/{name}", "ben/out"), status, code, says)


def with_settings(code: str, says: str, **sections: Any) -> Refusal:
    return Refusal(conversion("ada/llama", "ben/out", **sections), 422, code, says)


REFUSED = {
    "no such repo": of_source("nowhere", 422, "source_not_found", "ada/nowhere"),
    "no such revision": with_settings("source_not_found", "no such revision", source={"revision": "v9"}),
    "somebody else's private repo": of_source("private", 422, "source_not_found", "ada/private"),
    "gated, terms not accepted": of_source("gated", 403, "source_gated", "ada/gated"),
    "pickles only": of_source("pickles", 422, "weights_unsafe", "pytorch_model.bin"),
    "code in the repo": of_source("remote-code", 422, "source_unsupported", "auto_map"),
    "an encoder": of_source("encoder", 422, "source_unsupported", "bert"),
    "no KV cache": of_source("recurrent", 422, "source_unsupported", "recurrent state"),
    "broken config.json": of_source("broken-config", 422, "source_invalid", "config.json"),
    "truncated weights": of_source("truncated", 422, "source_invalid", "model.safetensors"),
    "a layer missing": of_source("missing-layer", 422, "source_invalid", "layers"),
    "no tokenizer": of_source("no-tokenizer", 422, "source_invalid", "tokenizer"),
    "an unknown key": with_settings("config_invalid", "did you mean 'max_kl'", codec={"ratio": None, "max_lk": 0.1}),
    "an unknown section": with_settings("config_invalid", "did you mean 'calibration'", calibraton={"seed": 1}),
    "two targets at once": with_settings("config_invalid", "exactly one", codec={"max_kl": 0.1}),
    "a number out of bounds": with_settings("config_invalid", "tokens", calibration={"tokens": 3}),
    "every token kept as it is": with_settings("config_invalid", "recent_tokens", codec={"recent_tokens": 96}),
    "a file of the server": with_settings("config_invalid", "/etc/passwd", calibration={"dataset": "/etc/passwd"}),
    "more text than there is": with_settings(
        "dataset_invalid", "calibration.tokens", calibration={"tokens": 4_194_304}
    ),
    "no such dataset": with_settings("dataset_invalid", "ada/void", calibration={"dataset": "ada/void"}),
    "a dataset of pictures": with_settings("dataset_invalid", "ada/pictures", validation={"dataset": "ada/pictures"}),
    "a token that may only read": Refusal(
        conversion("ada/llama", "ada/out"), 403, "target_forbidden", "write", ADA_READS
    ),
    "a target that exists": Refusal(conversion("ada/llama", "ada/qwen2"), 409, "target_exists", "ada/qwen2", ADA),
    "to be updated, and not ours": Refusal(
        conversion("ada/llama", "ada/qwen2", target={"on_existing": "update"}), 409, "target_exists", "ada/qwen2", ADA
    ),
    "somebody else's namespace": Refusal(conversion("ada/llama", "ada/out"), 403, "target_forbidden", "ada"),
    "the source itself": Refusal(conversion("ada/llama", "ada/llama"), 422, "config_invalid", "source", ADA),
    "a private model made public": Refusal(
        conversion("ada/private", "ada/out", target={"visibility": "public"}), 422, "config_invalid", "private", ADA
    ),
    "a token of nobody": Refusal(conversion("ada/llama", "ada/out"), 401, "token_invalid", "token", "hf_nobody"),
    "no token": Refusal(conversion("ada/llama", "ada/out"), 401, "token_missing", "token", ""),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_the_request(stocked: Services, services: Services, name: str) -> None:
    wrong = REFUSED[name]
    known = wrong.token in {ADA, ADA_READS, BEN}
    before = stocked.person(wrong.token).jobs() if known else []
    repos = list(stocked.hub.storage.repos())
    response = stocked.person(wrong.token).ask("POST", "/v1/jobs", json=wrong.body)
    assert response.status_code == wrong.status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert problem["code"] == wrong.code
    assert wrong.says in problem["detail"] + problem["remedy"]
    assert problem["remedy"]
    if known:
        assert stocked.person(wrong.token).jobs() == before
    assert list(stocked.hub.storage.repos()) == repos


@dataclass(frozen=True)
class Failure:
    """A request that looks sound, and how its job must end; it may finish the stages up to `until`, no more."""

    body: Json
    code: str
    says: str
    until: str = "pull"


def late(name: str, code: str, says: str, *, source: str = "llama", until: str = "pull", **sections: Any) -> Failure:
    return Failure(conversion(f"ada/{source}", f"ada/never-{name}", **sections), code, says, until)


FAILING = {
    failure.body["target"]["repo"].removeprefix("ada/never-"): failure
    for failure in (
        late("nan", "source_invalid", "layers.1.mlp.up_proj.weight", source="not-a-number"),
        late("tensor", "source_invalid", "norm.weight", source="missing-tensor"),
        late("tokenizer", "source_invalid", "tokenizer", source="broken-tokenizer"),
        late("columns", "dataset_invalid", "text column", calibration={"dataset": "ada/numbers"}),
        late("short", "dataset_invalid", "Name a larger dataset", validation={"dataset": "ada/short", "windows": 8}),
        late("kl", "config_invalid", "max_kl", codec={"ratio": None, "max_kl": 1e-9}, until="fit"),
        late("gate", "quality_gate", "KL", validation={"gate": {"max_kl": 1e-9, "min_top1": 0}}, until="validate"),
    )
}


@pytest.fixture(scope="module")
def submitted(stocked: Services) -> dict[str, Json]:
    """All of them at once: two run at a time."""
    return {name: stocked.person().submit(failure.body) for name, failure in FAILING.items()}


@pytest.mark.parametrize("name", FAILING)
def test_failed_early(stocked: Services, services: Services, submitted: dict[str, Json], name: str) -> None:
    failure, ada = FAILING[name], stocked.person()
    job = ada.reach(submitted[name], "failed")
    assert job["error"]["code"] == failure.code, job["error"]
    assert failure.says in job["error"]["message"] + job["error"]["remedy"]
    assert job["error"]["remedy"]
    assert str(stocked.folder) not in json.dumps(job)
    assert job["attempts"] == 1
    assert ada.stages(job, "finished") == STAGES[: STAGES.index(failure.until) + 1]
    assert ada.events(job)[-1]["data"] == {"state": "failed", "error": job["error"]}
    assert job["result"] is None
    assert not stocked.exists(failure.body["target"]["repo"])
    wait_for(lambda: not stocked.workspace(job).exists(), FAILED_KEPT_S + 10)


def test_a_failed_gate_shows_what_was_measured(stocked: Services, submitted: dict[str, Json]) -> None:
    ada = stocked.person()
    job = ada.reach(submitted["gate"], "failed")
    report = ada.ask("GET", f"{job['links']['report']}/report.json").raise_for_status().json()
    assert not report["gate"]["passed"]
    assert report["gate"]["max_kl"] == 1e-9
    assert report["summary"]["kl_mean"] > 1e-9
    assert all(line in job["error"]["message"] for line in report["gate"]["failures"])
    card = ada.ask("GET", f"{job['links']['report']}/README.md").raise_for_status().text
    assert "Not published" in card
    assert "![head alignment](figures/head_alignment.png)" in card
    assert ada.ask("GET", f"{job['links']['report']}/figures/head_alignment.png").raise_for_status().content
    assert stocked.person(BEN).ask("GET", job["links"]["report"]).status_code == 404


def test_only_a_measured_job_has_a_report(stocked: Services, submitted: dict[str, Json]) -> None:
    ada = stocked.person()
    job = ada.reach(submitted["nan"], "failed")
    answer = ada.ask("GET", job["links"]["report"])
    assert (answer.status_code, answer.json()["code"]) == (404, "report_not_found")
