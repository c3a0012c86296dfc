"""Model cards: what the client is told about good, doubtful, wrong and hostile ones."""

import json
import time

import pytest
from devhub_fixture import DevHub, devhub_process, devhub_server, hub_client, quiet_client
from huggingface_hub import ModelCard, ModelCardData

from devhub.card import check_card

__all__ = ["devhub_process", "devhub_server", "hub_client"]
pytestmark = quiet_client


def upload(hub: DevHub, repo: str, card: str) -> None:
    hub.api().create_repo(repo)
    hub.api().upload_file(path_or_fileobj=card.encode(), path_in_repo="README.md", repo_id=repo)


def test_good_card_arrives_as_data(devhub_server: DevHub) -> None:
    data = ModelCardData(
        license="apache-2.0", base_model="me/base", tags=["kvalign"], library_name="transformers", language="en"
    )
    upload(devhub_server, "me/good-card", str(ModelCard(f"---\n{data.to_yaml()}\n---\n# Title\n")))
    found = devhub_server.api().model_info("me/good-card").card_data
    assert found is not None
    assert (found.license, found.base_model, found.tags) == ("apache-2.0", "me/base", ["kvalign"])


def test_card_without_metadata_is_warned_about(devhub_server: DevHub) -> None:
    with pytest.warns(UserWarning, match="empty or missing yaml metadata"):
        upload(devhub_server, "me/bare-card", "# Only text\n")


@pytest.mark.parametrize(
    ("metadata", "complaint"),
    [
        ("a: [1, 2", "Invalid YAML"),
        ("- a\n- b", "must be a mapping"),
        ("license: [1, 2]", '"license" must be'),
        ("tags: kvalign", '"tags" must be a list'),
        ("base_model_relation: cousin", '"base_model_relation" must be one of'),
        ("model-index:\n- results: []", '"model-index" must be a list'),
        ("license_link: 5", '"license_link" must be a string'),
        ("x: &a [1]\ny: *a", "aliases are not allowed"),
        ('x: "\\uD800"', "plain values"),
    ],
)
def test_wrong_card_stops_the_commit(devhub_server: DevHub, metadata: str, complaint: str) -> None:
    repo = f"me/wrong-card-{abs(hash(metadata))}"
    with pytest.raises(ValueError, match="Invalid metadata") as refusal:
        upload(devhub_server, repo, f"---\n{metadata}\n---\ntext")
    assert complaint in str(refusal.value)
    assert devhub_server.api().list_repo_files(repo) == [".gitattributes"]


@pytest.mark.parametrize(
    "card",
    [
        "---\n" + "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(f"k{i}: &k{i} [*a,*a,*a]\n" for i in range(30)) + "---\n",
        "---\nx: " + "[" * 50_000 + "\n---\n",
        "---\n" + "- " * 50_000 + "\n---\n",
        "---\n" + "x" * 2_000_000 + "\n---\n",
        "---\n" * 200_000,
        "\n" * 500_000 + "x",
    ],
    ids=["bomb", "deep list", "deep dashes", "long", "many fences", "many newlines"],
)
def test_hostile_card_is_answered_quickly(card: str) -> None:
    start = time.monotonic()
    check = check_card(card)
    assert check.errors or check.warnings
    assert time.monotonic() - start < 5


def test_odd_values_can_always_be_sent_as_json() -> None:
    card = (
        "---\ndate: 2026-01-01\nnan: .nan\ninf: -.inf\n1: one\nbytes: !!binary aGk=\nset: !!set {a, b}\nn: null\n---\n"
    )
    text = json.dumps(check_card(card).data, allow_nan=False)
    assert json.loads(text)["date"] == "2026-01-01"
    assert json.loads(text)["1"] == "one"
