"""A person submits a model and gets a converted one: every tiny model, in both layouts, from request to text."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e_models import LICENCE, MODELS
from e2e_services import ADA, BEN, STAGES, Json, Person, Services, conversion, wait_for
from huggingface_hub import ModelCardData, snapshot_download
from transformers import AutoModelForCausalLM

import kvalign
from kvalign.capture import run
from kvalign.config import ConversionConfig
from kvalign.generation import continue_prompt

LAYOUTS = ("full", "codec")
FIGURES = {
    *("figures/head_alignment.png", "figures/head_alignment.npz", "figures/activations.png", "figures/activations.npz"),
    *("figures/bits.png", "figures/bits.json", "figures/sensitivity.png", "figures/sensitivity.json"),
    *("figures/rate_distortion.png", "figures/rate_distortion.json"),
    *("figures/kl_by_position.png", "figures/kl_by_position.json"),
}
ADDED = {"README.md", "report.json", "kvalign_config.json", "kvalign_codec.safetensors"} | FIGURES
CARRIED = {
    "full": {"LICENSE", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
             "tokenizer_config.json"},
    "codec": {"LICENSE"},
}  # fmt: skip
MADE = {"full": {"model.safetensors.index.json"}, "codec": set()}  # so that no engine takes the codec for weights
PROMPT = "The lighthouse keeper wrote down every ship that passed, its flag and the hour, for forty years. " * 2


@dataclass(frozen=True)
class Converted:
    """A job that has succeeded, and the folder of the model that it was asked to convert."""

    job: Json
    source: Path
    layout: str
    services: Services
    ada: Person

    @property
    def target(self) -> str:
        return str(self.job["config"]["target"]["repo"])

    def download(self) -> Path:
        """The published files, by the real client."""
        return Path(snapshot_download(self.target, token=ADA, endpoint=self.services.hub.url))


@pytest.fixture(scope="module")
def submitted(all_services: Services) -> dict[tuple[str, str], Json]:
    """All conversions, asked for at once: two run at a time."""
    ada = all_services.person()
    return {
        (name, layout): ada.submit(
            conversion(f"ada/{name}", f"ada/{name}-{layout}", target={"layout": layout}, labels={"model": name})
        )
        for name in MODELS
        for layout in LAYOUTS
    }


@pytest.fixture(params=[(name, layout) for name in MODELS for layout in LAYOUTS], ids="-".join)
def converted(
    request: pytest.FixtureRequest,
    services: Services,
    models: dict[str, Path],
    submitted: dict[tuple[str, str], Json],
) -> Converted:
    name, layout = request.param
    ada = services.person()
    job = ada.reach(submitted[name, layout], "succeeded")
    return Converted(job, models[name], layout, services, ada)


def test_the_job_tells_all_there_is_to_tell(converted: Converted) -> None:
    job = converted.job
    assert job["attempts"] == 1
    assert list(job["timestamps"]) == ["queued", "running", "succeeded"]
    assert list(job["stage_seconds"]) == STAGES
    assert all(seconds >= 0 for seconds in job["stage_seconds"].values())
    assert job["config"] == ConversionConfig.parse(job["config"]).model_dump(mode="json")
    assert job["error"] is None
    assert job["result"]["repo"] == converted.target
    assert job["result"]["url"] == f"{converted.services.hub.url}/{converted.target}"
    assert 3.9 < job["result"]["ratio"] < 5
    assert 0 < job["result"]["kl_mean"] < 1
    assert 0.5 < job["result"]["top1"] <= 1
    assert job["source_commit"] == converted.services.hub.storage.repo(job["config"]["source"]["repo"]).at("main").oid


def test_one_commit_holds_exactly_the_expected_files(converted: Converted) -> None:
    info = converted.services.api().model_info(converted.target, files_metadata=True)
    assert info.private
    assert info.sha == converted.job["result"]["commit"]
    assert converted.services.commits_of(converted.job) == [info.sha]
    assert len(list(converted.services.hub.storage.repo(converted.target).history("main"))) == 2  # with the first one
    names = {file.rfilename for file in info.siblings or []}
    assert names == {".gitattributes"} | ADDED | CARRIED[converted.layout] | MADE[converted.layout]
    assert not converted.services.api(BEN).repo_exists(converted.target)


def test_what_is_carried_over_is_byte_for_byte_the_source(converted: Converted) -> None:
    folder = converted.download()
    for name in CARRIED[converted.layout]:
        assert (folder / name).read_bytes() == (converted.source / name).read_bytes(), name


def test_the_card_is_valid_and_carries_the_licence(converted: Converted) -> None:
    text = (converted.download() / "README.md").read_text()
    answer = converted.services.hub.http.post("/api/validate-yaml", json={"repoType": "model", "content": text})
    assert answer.raise_for_status().json() == {"errors": [], "warnings": []}
    data = converted.services.api().model_info(converted.target).card_data
    assert isinstance(data, ModelCardData)
    assert data.license == LICENCE
    assert data.base_model == converted.job["config"]["source"]["repo"]
    assert data.get("base_model_relation") == {"full": "quantized", "codec": "adapter"}[converted.layout]
    assert data.library_name == "transformers"
    assert set(data.tags or []) >= {"kvalign", "kv-cache-compression"}
    assert data.eval_results
    assert {result.metric_type for result in data.eval_results} == {"kl_nats_mean", "top1_agreement", "coded_ratio"}


def test_the_report_is_served_and_published_alike(converted: Converted) -> None:
    folder, ada, path = converted.download(), converted.ada, converted.job["links"]["report"]
    report = ada.ask("GET", path)
    assert report.headers["content-type"] == "application/json"
    assert report.content == (folder / "report.json").read_bytes()
    assert ada.ask("GET", f"{path}/README.md").content == (folder / "README.md").read_bytes()
    for name in FIGURES:
        assert ada.ask("GET", f"{path}/{name}").content == (folder / name).read_bytes(), name
    assert ada.ask("GET", f"{path}/figures/bits.png").headers["content-type"] == "image/png"
    found = report.json()
    assert found["gate"]["passed"]
    assert found["summary"]["floor_kl"] < 1e-6
    assert found["summary"]["artifact_bytes"] == (folder / "kvalign_codec.safetensors").stat().st_size
    assert {name: found["summary"][name] for name in ("ratio", "kl_mean", "top1")} == {
        name: converted.job["result"][name] for name in ("ratio", "kl_mean", "top1")
    }
    assert found["source"]["commit"] == converted.job["source_commit"]
    described = json.loads((folder / "kvalign_config.json").read_text())
    assert described["base"]["repo"] == converted.job["config"]["source"]["repo"]


def test_events_tell_the_whole_story_in_order(converted: Converted) -> None:
    events = converted.ada.events(converted.job)
    assert [event["id"] for event in events] == list(range(1, len(events) + 1))
    assert [event["at"] for event in events] == sorted(event["at"] for event in events)
    states = [event["data"]["state"] for event in events if event["kind"] == "state"]
    assert states == ["queued", "running", "succeeded"]
    assert (events[0]["kind"], events[-1]["kind"]) == ("state", "state")
    stages = [(event["data"]["stage"], event["data"]["status"]) for event in events if event["kind"] == "stage"]
    assert stages == [(stage, status) for stage in STAGES for status in ("started", "finished")]
    running = ""
    for event in events:
        if event["kind"] == "stage":
            running = event["data"]["stage"]
        elif event["kind"] == "progress":
            assert event["data"]["stage"] == running
    streamed = list(converted.ada.stream(converted.job))
    assert [(number, kind) for number, kind, _ in streamed] == [(event["id"], event["kind"]) for event in events]
    assert list(converted.ada.stream(converted.job, last_event_id=len(events) - 3)) == streamed[-3:]


def test_the_model_loads_and_generates_from_its_compressed_cache(converted: Converted) -> None:
    model, tokenizer, codec = kvalign.load(converted.target, token=ADA, endpoint=converted.services.hub.url)
    found = continue_prompt(model, tokenizer, codec, PROMPT, max_new_tokens=8)
    assert found.prompt_tokens == len(PROMPT) + 1  # with the one that opens every text
    assert found.text
    assert found.text_uncompressed
    assert found.coded_ratio > 3
    assert found.cache_ratio > 1.3  # of so short a prompt, most tokens are kept as they are

    inputs = tokenizer(PROMPT, return_tensors="pt")
    cache = codec.cache(model)
    generated = model.generate(**inputs, cache=cache, max_new_tokens=2, do_sample=False)
    restored = codec.decode_dense(codec.encode(cache, input_ids=generated[:, : cache.get_seq_length()]))
    token = torch.tensor([[ord("t")]])
    exact, measured = (run(model, token, copy)[0][0, -1].log_softmax(-1) for copy in (cache, restored))
    assert 0 < torch.nn.functional.kl_div(measured, exact, log_target=True, reduction="sum") < 0.1


def test_the_full_layout_is_the_base_model_to_stock_transformers(converted: Converted) -> None:
    if converted.layout == "codec":
        assert not list(converted.download().glob("model*"))
        return
    tokens = torch.arange(40)[None]
    logits = [_stock(folder)(tokens).logits for folder in (converted.source, converted.download())]
    assert torch.equal(*logits)


def test_nothing_is_left_on_the_worker(converted: Converted) -> None:
    wait_for(lambda: not converted.services.workspace(converted.job).exists())


def test_jobs_are_found_by_their_labels(services: Services, submitted: dict[tuple[str, str], Json]) -> None:
    found = services.person().ask("GET", "/v1/jobs", params={"label": "model=gpt2"}).json()
    wanted = [submitted["gpt2", layout]["id"] for layout in LAYOUTS]
    assert sorted(job["id"] for job in found["data"]) == sorted(wanted)
    assert services.person(BEN).ask("GET", "/v1/jobs", params={"label": "model=gpt2"}).json()["data"] == []


@torch.no_grad()
def _stock(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
