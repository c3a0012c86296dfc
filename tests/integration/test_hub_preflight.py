"""worker.preflight against a real devhub: every bad source is found before it is downloaded."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from devhub_fixture import ME, ME_READING, YOU, DevHub, devhub_process, devhub_server, hub_client, quiet_client
from safetensors.numpy import save_file

from devhub.importer import import_folder
from devhub.names import parse_repo_spec
from kvalign.config import ConversionConfig
from kvalign.errors import HubUnavailable
from worker.hub import Hub
from worker.preflight import Preflight, preflight

__all__ = ["devhub_process", "devhub_server", "hub_client"]

pytestmark = quiet_client

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "vocab_size": 16,
}
PLENTY = 10**12


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    (folder / "pytorch_model.bin").write_bytes(b"\0" * 5000)
    save_file({"model.embed_tokens.weight": np.zeros((16, 8), np.float32)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def ask(devhub_server: DevHub, model: Path, request: pytest.FixtureRequest) -> Callable[..., Preflight]:
    """Publish the model folder as it is now, and preflight its conversion."""
    name = f"f{abs(hash(request.node.name)) % 10**9}"

    def ask(token: str = ME, limits: tuple[int | None, int | None] = (PLENTY, PLENTY), **changes: Any) -> Preflight:
        import_folder(devhub_server.storage, parse_repo_spec(f"me/{name}"), model)
        settings = {"source": {"repo": f"me/{name}"}, "target": {"repo": f"{name}-kvalign"}}
        config = ConversionConfig.parse(settings | changes)
        return preflight(Hub(devhub_server.url, token, pauses_s=(0.01,)), config, *limits)

    return ask


def failed(answer: Preflight) -> dict[str, str | None]:
    """Names and codes of failed checks."""
    for check in answer.checks:
        assert check.reason.endswith((".", ")")), check
        assert (check.code is None) == check.ok
        assert check.ok or check.remedy, check
    return {check.name: check.code for check in answer.checks if not check.ok}


def test_a_sound_source_passes_every_check(ask: Callable[..., Preflight], model: Path) -> None:
    answer = ask()
    assert failed(answer) == {}
    assert [check.name for check in answer.checks] == [
        "account",
        "source",
        "licence",
        "tokenizer",
        "config",
        "architecture",
        "sizes",
        "weights",
        "windows",
        "disk",
        "memory",
        "target",
    ]
    source, estimate = answer.passed()
    wanted = ("config.json", "tokenizer.json", "README.md", "model.safetensors")
    assert estimate.download_bytes == sum((model / name).stat().st_size for name in wanted)
    assert "mit" in next(check.reason for check in answer.checks if check.name == "licence")
    assert len(source.commit) == 40


def spoil_config(**changes: Any) -> Callable[[Path], Any]:
    return lambda folder: (folder / "config.json").write_text(json.dumps(CONFIG | changes))


def spoil_weights(content: bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / "model.safetensors").write_bytes(content)


def truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


def quantize(folder: Path) -> None:
    save_file({"model.embed_tokens.weight": np.zeros((16, 8), np.int8)}, folder / "model.safetensors")


def index(**weight_map: Any) -> Callable[[Path], Any]:
    def write(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return write


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (spoil_config(model_type="bert"), {"architecture": "source_unsupported"}),
        (spoil_config(model_type="mamba"), {"architecture": "source_unsupported"}),
        (spoil_config(model_type="mine", auto_map={"AutoModel": "x.Y"}), {"architecture": "source_unsupported"}),
        (spoil_config(rope_scaling={"type": "dynamic"}), {"architecture": "source_unsupported"}),
        (spoil_config(num_hidden_layers=10**9), {"sizes": "source_invalid"}),
        (spoil_config(num_hidden_layers=2), {}),
        (
            spoil_config(vocab_size=17, model_type="t5"),
            {"architecture": "source_unsupported", "weights": "source_invalid"},
        ),
        (lambda folder: (folder / "config.json").write_text("{"), {"config": "source_invalid"}),
        (lambda folder: (folder / "config.json").unlink(), {"config": "source_not_found"}),
        (lambda folder: (folder / "tokenizer.json").unlink(), {"tokenizer": "source_invalid"}),
        (lambda folder: (folder / "model.safetensors").unlink(), {"weights": "weights_unsafe"}),
        (truncate, {"weights": "source_invalid"}),
        (quantize, {"weights": "source_unsupported"}),
        (spoil_weights(b""), {"weights": "source_invalid"}),
        (spoil_weights(b"\xff" * 3000), {"weights": "source_invalid"}),
        (spoil_weights((10**6).to_bytes(8, "little") + b"{" * 10**6), {"weights": "source_invalid"}),
        (index(a="../model.safetensors"), {"weights": "source_invalid"}),
        (index(a="pytorch_model.bin"), {"weights": "source_invalid"}),
        (index(a="gone.safetensors"), {"weights": "source_invalid"}),
    ],
)
def test_a_bad_source_is_found_before_its_download(
    ask: Callable[..., Preflight], model: Path, spoil: Callable[[Path], Any], expected: dict[str, str]
) -> None:
    spoil(model)
    answer = ask()
    assert failed(answer) == expected
    assert "target" in {check.name for check in answer.checks}


def test_every_failure_is_reported_not_only_the_first(ask: Callable[..., Preflight], model: Path) -> None:
    (model / "tokenizer.json").unlink()
    spoil_config(model_type="t5")(model)
    answer = ask(
        limits=(1000, 1000),
        target={"repo": "you/elsewhere"},
        calibration={"dataset": "me/none"},
        validation={"dataset": "./local.txt"},
    )
    assert failed(answer) == {
        "tokenizer": "source_invalid",
        "architecture": "source_unsupported",
        "disk": "disk_full",
        "memory": "out_of_memory",
        "calibration_dataset": "dataset_invalid",
        "validation_dataset": "config_invalid",
        "target": "target_forbidden",
    }
    error = answer.first_error()
    assert error is not None
    assert error.code == "source_invalid"


def test_a_source_that_is_not_there_leaves_the_rest_to_be_checked(ask: Callable[..., Preflight]) -> None:
    answer = ask(source={"repo": "me/nothing"}, target={"repo": "you/x"})
    assert failed(answer) == {"source": "source_not_found", "target": "target_forbidden"}
    assert answer.estimate is None


def test_a_source_behind_a_gate(ask: Callable[..., Preflight], devhub_server: DevHub, model: Path) -> None:
    import_folder(devhub_server.storage, parse_repo_spec("you/closed"), model)
    devhub_server.api(YOU).update_repo_settings("you/closed", gated="auto")
    assert failed(ask(source={"repo": "you/closed"})) == {"source": "source_gated"}
    devhub_server.storage.find(parse_repo_spec("you/closed")).accept("me")
    closed = {"source": {"repo": "you/closed"}}
    assert failed(ask(**closed)) == {}
    assert failed(ask(**closed, target={"repo": "open", "visibility": "public"})) == {"target": "config_invalid"}


def test_a_token_that_may_only_read(ask: Callable[..., Preflight]) -> None:
    assert failed(ask(token=ME_READING)) == {"target": "target_forbidden"}


def test_a_token_that_nobody_has(ask: Callable[..., Preflight]) -> None:
    answer = ask(token="hf_nobody")
    assert failed(answer) == {"account": "source_forbidden", "source": "source_forbidden"}


def test_a_target_that_is_taken(ask: Callable[..., Preflight], devhub_server: DevHub) -> None:
    devhub_server.api().create_repo("me/taken")
    assert failed(ask(target={"repo": "me/taken"})) == {"target": "target_exists"}


def test_a_dataset_of_the_hub(ask: Callable[..., Preflight], devhub_server: DevHub, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "train.txt").write_text("Once upon a time.")
    import_folder(devhub_server.storage, parse_repo_spec("datasets/you/stories"), texts)
    answer = ask(calibration={"dataset": "you/stories"})
    assert failed(answer) == {}
    assert "train.txt" in next(check.reason for check in answer.checks if check.name == "calibration_dataset")


def test_limits_that_are_not_known_here_are_left_to_the_worker(ask: Callable[..., Preflight]) -> None:
    answer = ask(limits=(None, None))
    assert failed(answer) == {}
    assert all("the worker checks" in check.reason for check in answer.checks if check.name in {"disk", "memory"})


def test_a_hub_that_is_down_answers_nothing(ask: Callable[..., Preflight], devhub_server: DevHub) -> None:
    devhub_server.fault(path_regex="/api/whoami-v2", status=503, times=100)
    with pytest.raises(HubUnavailable):
        ask()


def test_nothing_but_headers_is_read(ask: Callable[..., Preflight], devhub_server: DevHub, model: Path) -> None:
    save_file({"model.embed_tokens.weight": np.zeros((16, 200_000), np.float32)}, model / "model.safetensors")
    spoil_config(hidden_size=200_000 // 2)(model)
    before = len(devhub_server.log())
    ask()
    read = [entry for entry in devhub_server.log()[before:] if "/resolve/" in entry["path"]]
    assert len(read) == 2
    assert not any("pytorch_model" in entry["path"] for entry in read)


def test_preflight_loads_no_torch() -> None:
    code = "import sys, worker.preflight; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
