"""Exact recall, protocol S: a detail of a coded prefix is asked for by a question that comes after the coding.

Continuing text forgives a lost detail; a question does not. Only a question that the uncompressed model answers tells
something of a codec, so each task is asked at the hardest difficulty that it holds. Knows no codec.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvalign.capture import position_limit, run
from kvalign.errors import ConfigInvalid, DatasetInvalid
from kvalign.evaluate.greedy import attention_for
from kvalign.evaluate.protocol import Coder, PreparedWindow, copied, read_prefix
from kvalign.text import Document, Window, opening_tokens, plain_tokens

Task = Literal["key_value", "needle"]

# From hard to easy: pairs in the list, digits of the number.
DIFFICULTIES: dict[Task, tuple[int, ...]] = {"key_value": (32, 16, 8, 4, 2), "needle": (7, 5, 3)}
THRESHOLD = 0.9  # share of items that the uncompressed model must answer
QUESTION_TOKENS = 64  # room for a question and its answer
SMALLEST_PREFIX = 160
# What is asked for stands behind any sinks and before any tokens that a codec keeps because they are new.
_FIRST_TOKENS, _LAST_TOKENS = 16, 64
_VALUE_DIGITS = 4
_MOST_CHARACTERS = 1 << 15  # of one document: a book need not be tokenised whole
_KEYS = (
    "anchor apple barrel basket bell bottle bridge button candle carpet copper cotton desk drum engine feather fork"
    " garden glove hammer harbour helmet island jacket kettle ladder lantern lemon marble mirror needle onion orchard"
    " pencil pepper pillow rabbit saddle tunnel window"
)
_PLACES = (
    "the boat house",
    "the harbour office",
    "the north gate",
    "the old mill",
    "the reading room",
    "the seed store",
)


@dataclass(frozen=True)
class Item:
    """A prefix that holds a detail, the question put behind it, and the answer wanted; [T] int64 each."""

    prefix: Tensor
    question: Tensor
    answer: Tensor


@dataclass(frozen=True)
class RecallResult:
    """What one task found.

    applicable     whether the uncompressed model holds at some difficulty
    difficulty     the hardest at which it does, else the easiest tried; 0: none could be tried
    items          asked at this difficulty
    prefix_tokens  of each item: as asked for, or what the model's positions leave
    scores         share of items answered exactly: `uncompressed`, and each coder by its name where applicable
    """

    task: str
    applicable: bool
    difficulty: int
    items: int
    prefix_tokens: int
    scores: dict[str, float]


@torch.no_grad()
def measure_recall(
    model: Any,
    tokenizer: Any,
    documents: Sequence[Document],
    coders: Mapping[str, Coder],
    *,
    items: int = 12,
    prefix_tokens: int = 320,
    seed: int = 0,
    on_item: Callable[[], None] = lambda: None,
) -> list[RecallResult]:
    """Both tasks, of the uncompressed model and of each coder.

    documents  text to hide the details in
    coders     by name; the domain of the window they get is the task's name
    on_item    called after each item that the uncompressed model was asked, and each that a coder was

    A pass over the prefix and one over question and answer for each item and difficulty tried, which stops when the
    threshold is out of reach; then a round trip and one short pass for each item and coder. Uncompressed caches of all
    items of a task are held at once. Too little text or too few positions make a task not applicable.
    """
    prefix_tokens = max(0, min(prefix_tokens, position_limit(model) - QUESTION_TOKENS))
    found = []
    for task in DIFFICULTIES:
        tried = _tries(task, tokenizer, documents, items=items, prefix_tokens=prefix_tokens, seed=seed)
        found.append(_measure_task(model, task, tried, coders, prefix_tokens, on_item))
    return found


def made_items(
    task: Task,
    tokenizer: Any,
    documents: Sequence[Document],
    *,
    difficulty: int,
    items: int,
    prefix_tokens: int,
    seed: int,
) -> list[Item]:
    """Items of exactly `prefix_tokens` prefix tokens: a stretch of text with a list or a sentence somewhere inside.

    difficulty  pairs of the list, at most 40, or digits of the number
    Raises DatasetInvalid when the documents are shorter than one prefix, ConfigInvalid when prefix or question have no
    room for what must be in them.
    """
    chance = random.Random(f"{seed}/{task}/{difficulty}")  # noqa: S311  items to repeat, not a secret
    opening = opening_tokens(tokenizer)
    text = _filler(tokenizer, documents, items * prefix_tokens, chance)
    made = []
    for _ in range(items):
        hidden, question, answer = _MAKERS[task](chance, difficulty)
        detail = plain_tokens(tokenizer, hidden)
        latest = prefix_tokens - _LAST_TOKENS - len(detail)
        if prefix_tokens < SMALLEST_PREFIX or latest < _FIRST_TOKENS:
            raise ConfigInvalid(
                f"A prefix of {prefix_tokens} tokens has no room for {task} of difficulty {difficulty}, which takes"
                f" {len(detail)} tokens and {_FIRST_TOKENS + _LAST_TOKENS} around them.",
                f"Make prefixes of {SMALLEST_PREFIX} tokens or more, or the task easier.",
            )
        length = prefix_tokens - len(opening) - len(detail)
        if len(text) < length:
            raise DatasetInvalid(
                f"The text for recall holds {len(text)} tokens; {length} are needed.", "Name a larger dataset."
            )
        start = chance.randrange(len(text) - length + 1)
        around = opening + text[start : start + length]
        at = chance.randint(_FIRST_TOKENS, latest)
        asked, wanted = _question_and_answer(tokenizer, question, answer)
        made.append(
            Item(torch.tensor([*around[:at], *detail, *around[at:]]), torch.tensor(asked), torch.tensor(wanted))
        )
    return made


def _filler(tokenizer: Any, documents: Sequence[Document], wanted: int, chance: random.Random) -> list[int]:
    """Tokens of documents in random order, until there are as many as wanted or no more documents."""
    found: list[int] = []
    for document in chance.sample(documents, len(documents)):
        if len(found) >= wanted:
            break
        found += plain_tokens(tokenizer, document.text[:_MOST_CHARACTERS] + "\n\n")
    return found


def _key_value(chance: random.Random, pairs: int) -> tuple[str, str, str]:
    """A list of pairs, the question for one of them, the answer."""
    keys = chance.sample(_KEYS.split(), pairs)
    values = chance.sample(range(10 ** (_VALUE_DIGITS - 1), 10**_VALUE_DIGITS), pairs)
    lines = [f"{key}: {value}\n" for key, value in zip(keys, values, strict=True)]
    asked = chance.randrange(pairs)
    # Without the words before it, a small model takes the key for the start of a list of its own.
    question = f"\n\nAgain, from the list of values:\n{keys[asked]}:"
    return "\n\nList of values:\n" + "".join(lines) + "\n", question, f" {values[asked]}"


def _needle(chance: random.Random, digits: int) -> tuple[str, str, str]:
    """A sentence with a number, the question for it, the answer."""
    place = chance.choice(_PLACES)
    number = "".join(chance.choices("0123456789", k=digits))
    return f"\n\nNote: the code for {place} is {number}.\n\n", f"\n\nThe code for {place} is", f" {number}"


_MAKERS: dict[Task, Callable[[random.Random, int], tuple[str, str, str]]] = {
    "key_value": _key_value,
    "needle": _needle,
}


def _question_and_answer(tokenizer: Any, question: str, answer: str) -> tuple[list[int], list[int]]:
    """Tokens of both as they are behind one another; each by itself where a token would span the boundary."""
    asked, whole = plain_tokens(tokenizer, question), plain_tokens(tokenizer, question + answer)
    wanted = whole[len(asked) :] if whole[: len(asked)] == asked else plain_tokens(tokenizer, answer)
    if not asked or not wanted or len(asked) + len(wanted) > QUESTION_TOKENS:
        raise ConfigInvalid(
            f"Question and answer take {len(asked)} and {len(wanted)} tokens; {QUESTION_TOKENS} together is the limit.",
            "Measure recall with a tokenizer of usual text.",
        )
    return asked, wanted


def _tries(task: Task, tokenizer: Any, documents: Sequence[Document], **settings: int) -> list[tuple[int, list[Item]]]:
    """The difficulties for which there is room and text, from hard to easy, with their items."""
    found = []
    for difficulty in DIFFICULTIES[task]:
        try:
            found.append((difficulty, made_items(task, tokenizer, documents, difficulty=difficulty, **settings)))
        except (ConfigInvalid, DatasetInvalid):
            continue  # an easier one is shorter; where none fits, the result says so
    return found


def _measure_task(
    model: Any,
    task: Task,
    tried: list[tuple[int, list[Item]]],
    coders: Mapping[str, Coder],
    prefix_tokens: int,
    on_item: Callable[[], None],
) -> RecallResult:
    result = RecallResult(task, False, 0, 0, prefix_tokens, {})
    for index, (difficulty, items) in enumerate(tried):
        easiest = index == len(tried) - 1
        windows, share = _uncompressed(model, task, items, on_item, to_the_end=easiest)
        holds = share >= THRESHOLD
        scores = {"uncompressed": share}
        if holds:
            scores |= {name: _coded(model, coder, windows, items, on_item) for name, coder in coders.items()}
        result = RecallResult(task, holds, difficulty, len(items), prefix_tokens, scores)
        if holds:
            break
    return result


def _uncompressed(
    model: Any, task: Task, items: list[Item], on_item: Callable[[], None], *, to_the_end: bool
) -> tuple[list[PreparedWindow], float]:
    """Items as coders get them, and the share answered; no items, and a share so far, when that is not enough."""
    windows: list[PreparedWindow] = []
    right = 0
    for item in items:
        missed = len(windows) - right
        if not to_the_end and (len(items) - missed) / len(items) < THRESHOLD:
            break
        cache, watched = read_prefix(model, item.prefix)
        window = Window(task, item.prefix, torch.cat([item.question, item.answer]))
        windows.append(PreparedWindow(window, cache, watched, reference=torch.empty(0), floor_kl=0.0))
        right += _answered(model, copied(cache), item)
        on_item()
    share = right / len(items)
    return (windows if share >= THRESHOLD else []), share


def _coded(
    model: Any, coder: Coder, windows: list[PreparedWindow], items: list[Item], on_item: Callable[[], None]
) -> float:
    """Share of items answered from what a coder leaves of their prefixes."""
    right = 0
    for window, item in zip(windows, items, strict=True):
        right += _answered(model, coder(replace(window, cache=copied(window.cache))), item)
        on_item()
    return right / len(items)


def _answered(model: Any, cache: Cache, item: Item) -> bool:
    """Whether greedy decoding behind prefix and question gives the answer. The cache is consumed."""
    # Greedy decoding gives exactly this answer if each of its tokens is the likeliest behind the ones before it, and
    # only then: so one pass over question and answer tells as much as decoding token by token.
    tokens = torch.cat([item.question, item.answer[:-1]])
    with attention_for(model, cache):
        logits, _ = run(model, tokens[None], cache, logits_to_keep=item.answer.numel())
    return torch.equal(logits[0].argmax(-1), item.answer)
