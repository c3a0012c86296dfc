"""Recall: where details stand, how answers are cut into tokens, and what a lost prefix does to a model that copies.

The model that copies is a tiny Llama whose logits are replaced: it knows the tokens before it only from the values
that its cache's first layer holds, and says what came behind the longest earlier stretch that equals the newest.
"""

import functools
import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from synthetic import blank, fitted_to, lossless
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as token_models
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerFast

from kvalign.capture import cache_argument, layer_tensors, run
from kvalign.errors import ConfigInvalid, DatasetInvalid
from kvalign.evaluate import recall
from kvalign.evaluate.protocol import PreparedWindow
from kvalign.evaluate.recall import DIFFICULTIES, Item, RecallResult, Task, made_items, measure_recall
from kvalign.text import Document, builtin_documents

TASKS: tuple[Task, ...] = ("key_value", "needle")
BYTES = tiny_models.tokenizer(adds_bos=False)
BYTES_WITH_BOS = tiny_models.tokenizer(adds_bos=True)
DOCUMENTS = builtin_documents("validation")
ROOM = tiny_models.POSITIONS - recall.QUESTION_TOKENS


def merging(merges: list[tuple[str, str]]) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that joins these pairs, across spaces and colons too."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {c: i for i, c in enumerate([*characters, *dict.fromkeys(a + b for a, b in merges)])}
    plain = Tokenizer(token_models.BPE(vocab=vocabulary, merges=merges))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    plain.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=plain)


PAIRS_OF_DIGITS = [(a, b) for a in "0123456789" for b in "0123456789"]
DIGITS_MERGED = merging(PAIRS_OF_DIGITS)
SPACE_AND_DIGIT_MERGED = merging([("Ġ", digit) for digit in "0123456789"] + PAIRS_OF_DIGITS)
BOUNDARY_MERGED = merging([(":", "Ġ"), ("s", "Ġ")])
TOKENIZERS = {
    "bytes": BYTES,
    "bytes with <s>": BYTES_WITH_BOS,
    "digits in twos": DIGITS_MERGED,
    "a space and a digit": SPACE_AND_DIGIT_MERGED,
    "a token across the boundary": BOUNDARY_MERGED,
}


def items_of(task: Task, tokenizer: Any = BYTES, **changed: Any) -> list[Item]:
    settings: dict[str, Any] = {"difficulty": {"key_value": 4, "needle": 7}[task], "items": 12, "prefix_tokens": 200}
    return made_items(task, tokenizer, DOCUMENTS, **(settings | {"seed": 0} | changed))


def detail_of(task: Task, question: str, answer: str) -> str:
    """What the prefix must say for this to be the answer."""
    if task == "key_value":
        return "\n" + question.splitlines()[-1] + answer + "\n"
    return f"Note: {question.strip().replace('The', 'the')}{answer}.\n"


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_detail_is_in_the_prefix_and_neither_among_its_first_nor_its_last_tokens(task: Task, name: str) -> None:
    tokenizer = TOKENIZERS[name]
    for item in items_of(task, tokenizer, prefix_tokens=256):
        assert {part.dtype for part in (item.prefix, item.question, item.answer)} == {torch.int64}
        assert item.prefix.shape == (256,)
        assert item.question.numel() + item.answer.numel() <= recall.QUESTION_TOKENS
        question, answer = tokenizer.decode(item.question), tokenizer.decode(item.answer)
        assert re.fullmatch(r" \d{7}" if task == "needle" else r" \d{4}", answer)
        detail = detail_of(task, question, answer)
        assert tokenizer.decode(item.prefix).count(detail) == 1
        assert detail in "\n" + tokenizer.decode(item.prefix[16:-64])


@pytest.mark.parametrize("task", TASKS)
def test_details_stand_anywhere_between(task: Task) -> None:
    places = []
    for item in items_of(task, items=60, difficulty=2 if task == "key_value" else 3, prefix_tokens=400):
        detail = detail_of(task, BYTES.decode(item.question), BYTES.decode(item.answer))
        places.append(bytes(item.prefix.tolist()).find(bytes(BYTES(detail)["input_ids"])))
    assert min(places) >= 15
    assert min(places) < 60
    assert 250 < max(places) < 400 - 64


def test_prefixes_open_as_the_tokenizer_opens_a_text_and_questions_do_not() -> None:
    for task in TASKS:
        for item in items_of(task, BYTES_WITH_BOS):
            assert (item.prefix == tiny_models.BOS).nonzero().flatten().tolist() == [0]
            assert not (torch.cat([item.question, item.answer]) == tiny_models.BOS).any()
        assert not any((item.prefix == tiny_models.BOS).any() for item in items_of(task, BYTES))


@pytest.mark.parametrize("task", TASKS)
def test_the_seed_decides(task: Task) -> None:
    def all_of(seed: int) -> list[int]:
        return torch.cat([part for item in items_of(task, seed=seed) for part in vars(item).values()]).tolist()

    assert all_of(0) == all_of(0)
    assert all_of(0) != all_of(1)
    assert len({tuple(item.answer.tolist()) for item in items_of(task)}) > 10


@pytest.mark.parametrize("pairs", [2, 4, 8])
def test_the_difficulty_is_the_number_of_pairs(pairs: int) -> None:
    for item in items_of("key_value", difficulty=pairs, prefix_tokens=256):
        lines = re.findall(r"\n([a-z]+): (\d{4})(?=\n)", BYTES.decode(item.prefix))
        assert len(lines) == pairs
        assert len(dict(lines)) == pairs


def test_what_surrounds_a_detail_is_text_of_the_documents() -> None:
    joined = {document.text for document in DOCUMENTS}
    for item in items_of("needle", items=6):
        before, after = re.split(r"\n\nNote: the code for [a-z ]+ is \d+\.\n\n", BYTES.decode(item.prefix))
        around = (before + after).replace("\ufffd", "")
        assert any(around[:20] in text for text in joined)
        assert any(around[-20:] in text for text in joined)


def test_answers_are_cut_as_they_follow_the_question() -> None:
    asked, wanted = recall._question_and_answer(SPACE_AND_DIGIT_MERGED, "\n\nfork:", " 4821")
    assert SPACE_AND_DIGIT_MERGED.convert_ids_to_tokens(wanted) == ["Ġ4", "8", "21"]
    assert asked + wanted == SPACE_AND_DIGIT_MERGED("\n\nfork: 4821")["input_ids"]


def test_a_token_across_the_boundary_leaves_both_as_they_are_by_themselves() -> None:
    asked, wanted = recall._question_and_answer(BOUNDARY_MERGED, "\n\nfork:", " 4821")
    assert asked == BOUNDARY_MERGED("\n\nfork:")["input_ids"]
    assert wanted == BOUNDARY_MERGED(" 4821")["input_ids"]
    assert len(BOUNDARY_MERGED("\n\nfork: 4821")["input_ids"]) == len(asked) + len(wanted) - 1


def test_what_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(ConfigInvalid, match="has no room for key_value of difficulty 32"):
        items_of("key_value", difficulty=32)
    with pytest.raises(ConfigInvalid, match="159 tokens has no room"):
        items_of("needle", prefix_tokens=159)
    with pytest.raises(DatasetInvalid, match=r"The text for recall holds \d+ tokens"):
        made_items("needle", BYTES, [Document("a", "short")], difficulty=3, items=2, prefix_tokens=200, seed=0)


def model_that_copies() -> Any:
    model = tiny_models.build("llama")
    inner, name = model.forward, cache_argument(model)
    with torch.no_grad():
        values = layer_tensors(run(model, torch.arange(256)[None])[1])[0][1][0]
    table = values.transpose(0, 1).flatten(1)  # [256, H D]: of a token, wherever it stands

    @functools.wraps(inner)
    def forward(tokens: Tensor, **kwargs: Any) -> Any:
        output = inner(tokens, **kwargs)
        held = layer_tensors(kwargs[name])[0][1][0].transpose(0, 1).flatten(1)
        text = "".join(map(chr, torch.cdist(held, table).argmin(1).tolist()))
        for back in range(output.logits.shape[1]):
            output.logits[:, -1 - back] = torch.eye(output.logits.shape[2])[following(text[: len(text) - back])]
        return output

    model.forward = forward
    return model


def following(text: str) -> int:
    """The token behind the longest earlier stretch that equals the newest."""
    for length in range(24, 0, -1):
        at = text.find(text[-length:], 0, len(text) - 1)
        if at >= 0:
            return ord(text[at + length])
    return 0


@pytest.fixture(scope="module")
def copying() -> Any:
    return model_that_copies()


def measured(model: Any, documents: list[Document] = DOCUMENTS, **changed: Any) -> dict[str, RecallResult]:
    settings: dict[str, Any] = {"coders": {"lossless": lossless, "blank": blank}, "items": 6}
    found = measure_recall(model, BYTES, documents, **(settings | changed))
    assert [result.task for result in found] == list(TASKS)
    return {result.task: result for result in found}


def test_a_model_that_copies_is_asked_at_the_hardest_that_fits_and_a_lost_prefix_costs_all(copying: Any) -> None:
    scores = {"uncompressed": 1.0, "lossless": 1.0, "blank": 0.0}
    found = measured(copying)
    # 8 pairs are longer than what the tiny model's positions leave of a prefix.
    assert found["key_value"] == RecallResult("key_value", True, 4, 6, ROOM, scores)
    assert found["needle"] == RecallResult("needle", True, 7, 6, ROOM, scores)


def test_each_lost_detail_costs_its_item(copying: Any) -> None:
    """A coder that blanks every other prefix loses half of the items."""
    turn = iter(range(1 << 20))

    def careless(prepared: PreparedWindow) -> DynamicCache:
        return blank(prepared) if next(turn) % 2 else lossless(prepared)

    found = measured(copying, coders={"careless": careless})
    assert [result.scores["careless"] for result in found.values()] == [0.5, 0.5]


def test_coders_get_the_prefix_alone_in_a_cache_of_their_own(copying: Any) -> None:
    seen: list[str] = []

    def consuming(prepared: PreparedWindow) -> DynamicCache:
        assert prepared.cache.get_seq_length() == prepared.window.prefix.numel() == ROOM
        assert prepared.watched
        assert torch.equal(torch.cat(prepared.watched.ids, dim=1)[0], prepared.window.prefix)
        seen.append(prepared.window.domain)
        return prepared.cache

    found = measured(copying, coders={"first": consuming, "second": consuming})
    assert seen == ["key_value"] * 12 + ["needle"] * 12
    assert all(set(result.scores.values()) == {1.0} for result in found.values())


def test_a_score_is_what_greedy_decoding_says(copying: Any) -> None:
    """Token by token on the cache, as text is generated; for an answer that it holds and one that it does not."""
    for item in items_of("needle", items=3, prefix_tokens=ROOM):
        for answer in (item.answer, item.answer.roll(1)):
            cache, decoded = DynamicCache(), []
            with torch.no_grad():
                run(copying, item.prefix[None], cache)
                tokens = item.question
                for _ in range(answer.numel()):
                    logits, _ = run(copying, tokens[None], cache, logits_to_keep=1)
                    tokens = logits[0, -1:].argmax(-1)
                    decoded.append(int(tokens))
                _, fresh = run(copying, item.prefix[None])
            answered = recall._answered(copying, fresh, Item(item.prefix, item.question, answer))
            assert answered == (decoded == answer.tolist()) == torch.equal(answer, item.answer)


def test_a_random_model_makes_no_task_applicable(tiny_model: Callable[[str], Any]) -> None:
    for family in ("llama", "gpt2"):  # gpt2 has no position behind its limit
        calls: list[int] = []
        found = measured(tiny_model(family), on_item=lambda calls=calls: calls.append(1))
        for task, easiest in (("key_value", 2), ("needle", 3)):
            assert found[task] == RecallResult(task, False, easiest, 6, ROOM, {"uncompressed": 0.0})
        # One miss of six puts 90 % out of reach; the easiest is asked to the end. 4 and 2 pairs; 7, 5 and 3 digits.
        assert len(calls) == (1 + 6) + (1 + 1 + 6)


def test_progress_is_told_for_every_item_and_coder(copying: Any) -> None:
    calls: list[int] = []
    measured(copying, on_item=lambda: calls.append(1))
    assert len(calls) == 2 * 6 * (1 + 2)


def test_a_difficulty_that_is_missed_too_often_gives_way_to_an_easier_one(
    copying: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ten items nine must be answered: two misses are too many for 7 digits, one miss is not for 5."""
    right, asked = recall._answered, []

    def answered(model: Any, cache: Any, item: Item) -> bool:
        digits = item.answer.numel() - 1
        asked.append(digits)
        misses = {7: 2, 5: 1}.get(digits, 0)
        return asked.count(digits) > misses and right(model, cache, item)

    monkeypatch.setattr(recall, "_answered", answered)
    monkeypatch.setattr(recall, "DIFFICULTIES", {"needle": DIFFICULTIES["needle"]})
    (found,) = measure_recall(copying, BYTES, DOCUMENTS, {"lossless": lossless}, items=10)
    assert (found.applicable, found.difficulty) == (True, 5)
    assert found.scores == {"uncompressed": 0.9, "lossless": 1.0}
    assert asked == [7] * 2 + [5] * 20


def test_the_prefix_asked_for_is_kept_where_it_fits(copying: Any) -> None:
    assert measured(copying, prefix_tokens=170)["needle"].prefix_tokens == 170


def test_too_few_positions_or_too_little_text_is_not_applicable(copying: Any) -> None:
    short = [Document("a", "Too short.")]
    for found in (
        measured(copying, prefix_tokens=150),
        measured(copying, short),
        measured(copying, []),
    ):
        for result in found.values():
            assert (result.applicable, result.difficulty, result.items, result.scores) == (False, 0, 0, {})


def test_one_long_document_is_not_tokenised_whole() -> None:
    class Counting:
        bos_token_id = None
        longest = 0

        def __call__(self, text: str, **options: Any) -> Any:
            self.longest = max(self.longest, len(text))
            return BYTES(text, **options)

    tokenizer = Counting()
    letters = "".join(random.Random(0).choices("abc ", k=500_000))
    made_items("needle", tokenizer, [Document("a", letters)], difficulty=3, items=2, prefix_tokens=200, seed=0)
    assert 30_000 < tokenizer.longest < 40_000


def test_the_benchmark_writes_a_row_for_each_setting(
    tiny_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    benchmark = pytest.importorskip("benchmarks.recall", reason="benchmarks are part of the checkout")
    folder, out = tiny_folder("llama"), tmp_path / "recall.json"
    fitted_to(tiny_models.build("llama")).save(tmp_path / "codec")
    monkeypatch.setattr(recall, "THRESHOLD", 0.0)
    options = ["--model", str(folder), "--artifact", str(tmp_path / "codec"), "--json", str(out), "--items", "2"]
    monkeypatch.setattr(sys, "argv", ["recall", *options, "--betas", "0", "0.3"])
    benchmark.main()
    result = json.loads(out.read_text())
    assert str(tmp_path) not in out.read_text()
    assert result["setup"]["prefix_tokens"] == ROOM
    rows = result["rows"]
    assert all(set(row) == {"task", "difficulty", "setting", "token_beta", "ratio", "recall"} for row in rows)
    for task, difficulty in (("key_value", 4), ("needle", 7)):
        own = [row for row in rows if row["task"] == task]
        assert {row["difficulty"] for row in own} == {difficulty}
        assert own[0]["setting"] == "uncompressed"
        assert len(own) == 1 + 2 * len(benchmark.OFFSETS)
        ratios = [row["ratio"] for row in own if row["token_beta"] == 0]
        assert ratios == sorted(ratios)
        assert ratios[0] < ratios[-1]
