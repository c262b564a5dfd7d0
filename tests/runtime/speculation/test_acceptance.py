"""Drafts change how many passes a text takes, and neither its tokens nor their distribution."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch

from hetero_runtime.errors import RequestError
from tests.runtime.speculation.imagined import GuessingRow, OracleRow, speculate

VOCAB, LENGTH, NUM_TEXTS = 3, 3, 1200
TABLE = torch.tensor([[0.2, 1.0, -1.0], [1.5, 0.0, 0.3], [-0.5, -2.0, 0.4]])
GUESSES = torch.tensor([0.2, 0.5, 0.3])
CHI2_LIMIT = 62.0
"""Chi-square with 26 degrees of freedom exceeds it once in ten thousand; the seeds are fixed."""

SAMPLED: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "top_k": {"temperature": 1.0, "top_k": 2},
    "penalty": {"temperature": 1.0, "repetition_penalty": 1.8},
}


def probability(text: tuple[int, ...], params: dict[str, Any]) -> float:
    """Of `text` after the token 0, by the table and the transforms of `params`, computed anew."""
    logp, history = 0.0, [0]
    for token in text:
        logits = TABLE[history[-1]].double().clone()
        for seen in set(history):
            penalty = params.get("repetition_penalty", 1.0)
            logits[seen] = logits[seen] / penalty if logits[seen] > 0 else logits[seen] * penalty
        logits /= params["temperature"]
        if "top_k" in params:
            logits[logits < logits.topk(params["top_k"]).values[-1]] = -math.inf
        logp += float(torch.log_softmax(logits, -1)[token])
        history.append(token)
    return math.exp(logp)


def chi_square(counts: Counter[tuple[int, ...]], params: dict[str, Any]) -> float:
    total = 0.0
    for text in product(range(VOCAB), repeat=LENGTH):
        expected = NUM_TEXTS * probability(text, params)
        if expected == 0:
            assert counts[text] == 0, text
        else:
            total += (counts[text] - expected) ** 2 / expected
    return total


@pytest.mark.parametrize("is_certain", [False, True], ids=["drawn drafts", "certain drafts"])
@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_texts_keep_their_distribution(name: str, is_certain: bool) -> None:
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(NUM_TEXTS):
        drafts = GuessingRow(GUESSES, is_certain=is_certain, seed=10**6 + seed)
        text, _, _ = speculate(TABLE, drafts, k=2, max_tokens=LENGTH, seed=seed, **SAMPLED[name])
        counts[tuple(text)] += 1
    assert chi_square(counts, SAMPLED[name]) < CHI2_LIMIT


def test_the_measure_tells_other_distributions_apart() -> None:
    """Texts of another temperature are not taken for those of this one."""
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(NUM_TEXTS):
        drafts = GuessingRow(GUESSES, is_certain=False, seed=10**6 + seed)
        text, _, _ = speculate(TABLE, drafts, k=2, max_tokens=LENGTH, seed=seed, temperature=1.7)
        counts[tuple(text)] += 1
    assert chi_square(counts, SAMPLED["plain"]) > CHI2_LIMIT


def greedy(table: torch.Tensor, num_tokens: int) -> list[int]:
    text = [0]
    for _ in range(num_tokens):
        text.append(int(table[text[-1]].argmax()))
    return text[1:]


@pytest.mark.parametrize("k", [1, 2, 7])
@pytest.mark.parametrize("every", [1, 2, 3, 5, 100])
def test_greedy_text_is_the_tables_own_with_any_draft(every: int, k: int) -> None:
    table = torch.randn(32, 32, generator=torch.Generator().manual_seed(3))
    answer = greedy(table, 20)
    text, sequence, drafts = speculate(table, OracleRow(1, answer, every=every), k=k, max_tokens=20)
    assert text == answer
    assert sequence.ids == [0, *answer[:-1]], "the model holds all but the last token, and nothing else"
    assert drafts.accepted + drafts.passes == 19, "the first token comes from the prompt"
    assert drafts.accepted <= drafts.drafted


def test_a_draft_that_is_right_takes_one_pass() -> None:
    table = torch.randn(32, 32, generator=torch.Generator().manual_seed(3))
    answer = greedy(table, 16)
    _, _, drafts = speculate(table, OracleRow(1, answer, every=100), k=15, max_tokens=16)
    assert (drafts.passes, drafts.drafted, drafts.accepted) == (1, 14, 14)
    assert drafts.tokens_per_pass == 15


def test_unsound_logits_end_the_text_at_their_step() -> None:
    table = torch.zeros(4, 4)
    table[0, 1] = table[1, 2] = table[2, 3] = 1
    table[3] = math.nan
    with pytest.raises(RequestError, match="step 3"):
        speculate(table, OracleRow(1, [1, 2, 3, 0, 0], every=100), k=4, max_tokens=5)
