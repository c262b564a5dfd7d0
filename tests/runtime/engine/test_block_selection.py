"""One set of experts for a draft: what the policy says is executed, on any machine, and copies less."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetero_runtime.engine import Engine
from hetero_runtime.errors import ConfigError
from hetero_runtime.evaluation.harness import Harness
from hetero_runtime.hf.router_choice import RouterScores
from hetero_runtime.plan import read_geometry
from hetero_runtime.speculation.block_routing import BlockRouting
from hetero_scheduler.routing import BlockSelection, Shape, block_reference
from hetero_scheduler.routing.block_selection import shares_of
from hetero_scheduler.routing.commitment import CommitmentRates
from tests.architectures import prompt_ids
from tests.runtime.engine.answers import Answer
from tests.runtime.engine.conftest import NUM_TOKENS, PROMPT, MakeAnswer, MakeCheckpoint
from tests.runtime.engine.rest import assert_at_rest
from tests.runtime.speculation.drafters import nearly
from tests.runtime.speculation.imagined import OneRow, OracleRow

WIDE: dict[str, Any] = {"growth": 1e6, "rerouting": 0.0}
"""Everything that anyone wants is eligible: exact routing."""
NARROW: dict[str, Any] = {"growth": 0.5, "rerouting": 0.3, "rescue": 0.6}
TEXT = prompt_ids(9, seed=4)[0].tolist()
REPEATED = TEXT * 3
"""A prompt whose words come again, so that something is drafted."""


def load(folder: Path, keys: dict[str, Any], **sections: Any) -> Engine:
    settings: dict[str, Any] = {
        "device": "cpu",
        "memory": {"residency": 0.3},
        "execution": {"max_rows": 2, "max_length": 256},
        "speculation": {"drafter": "prompt_lookup", "k": 6},
        "routing": {"policy": "block_selection", **keys},
    }
    return Engine.load(folder, **(settings | sections))


def draft_by(engine: Engine, expected: Answer, *, every: int) -> None:
    """From now on drafts for PROMPT come from `expected`, with an error at every so-manieth token."""
    speculation = engine._parts.speculation
    assert speculation is not None
    row = OneRow(OracleRow(PROMPT.shape[1], expected.token_ids, every=every))
    engine._shared.stepper._drafter = row  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["Qwen3Moe", "DeepseekV3", "GptOss", "Qwen3Next", "Qwen3VLMoe"])
def test_a_set_of_everything_is_exact_routing(
    name: str, checkpoint: MakeCheckpoint, answer: MakeAnswer
) -> None:
    """Texts with recurrent states run rejected drafts again, inside the same sets."""
    expected = answer(name, "cpu")
    with load(checkpoint(name), WIDE) as engine:
        draft_by(engine, expected, every=5)
        completion = engine.generate(PROMPT[0].tolist(), max_tokens=NUM_TOKENS, ignore_eos=True)
        assert_at_rest(engine)
        stats = engine.stats()
    assert list(completion.token_ids) == expected.token_ids
    assert stats.drafts.accepted > NUM_TOKENS // 2
    assert stats.decode.routing.deviating == 0 < stats.decode.routing.demanded


@pytest.mark.parametrize("name", ["Qwen3Moe", "Qwen3Next"])
def test_narrow_sets_deviate_and_copy_less(name: str, checkpoint: MakeCheckpoint, answer: MakeAnswer) -> None:
    demanded, copies = [], []
    for keys in (WIDE, NARROW):
        with load(checkpoint(name), keys) as engine:
            draft_by(engine, answer(name, "cpu"), every=4)
            engine.generate(PROMPT[0].tolist(), max_tokens=NUM_TOKENS, ignore_eos=True)
            decode, passes = engine.stats().decode, engine.stats().drafts.passes
        demanded.append(decode.routing.demanded / passes)
        copies.append(decode.cache.misses / passes)
    assert decode.routing.deviating > 0
    assert demanded[1] < demanded[0]
    assert copies[1] < copies[0]


def test_memory_and_prefetch_change_no_token(checkpoint: MakeCheckpoint) -> None:
    folder = checkpoint("Qwen3Moe")
    memories: list[dict[str, Any]] = [
        {"slabs": read_geometry(folder).top_k},
        {"residency": 0.4, "pool": "per_layer"},
        {"slabs": "all"},
    ]
    said = set()
    for memory in memories:
        with load(folder, {**NARROW, "capacity": 6}, memory=memory) as engine:
            completion = engine.generate(REPEATED, max_tokens=40, ignore_eos=True)
            decode = engine.stats().decode
        said.add((completion.token_ids, decode.routing.demanded, decode.routing.deviating))
    assert len(said) == 1


def test_another_drafter_makes_another_text(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """The routed model includes the drafter (PSR §7): but the same one says the same again."""
    folder = checkpoint("Qwen3Moe")
    small = str(nearly(folder, tmp_path / "drafter", noise=0.4))
    texts = []
    for k in (2, 6, 6):
        speculation = {"drafter": "autoregressive", "model": small, "k": k}
        with load(folder, {**NARROW, "capacity": 6}, speculation=speculation) as engine:
            texts.append(engine.generate(REPEATED, max_tokens=48, ignore_eos=True).token_ids)
    assert texts[1] == texts[2] != texts[0]


class Listener:
    """What routers said in blocks, and what was executed, layer after layer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.heard: list[tuple[int, RouterScores, torch.Tensor]] = []
        choose = BlockRouting.choose

        def listening(
            routing: BlockRouting, layer: int, said: RouterScores, guess: torch.Tensor | None
        ) -> torch.Tensor:
            executed = choose(routing, layer, said, guess)
            self.heard.append((layer, said, executed))
            return executed

        monkeypatch.setattr(BlockRouting, "choose", listening)


class ReferencePool:
    """Recency in plain Python: `uses[layer]` in the order of their steps."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._last: dict[int, dict[int, tuple[int, int]]] = {}

    def read(self, layer: int, step: int, executed: Sequence[Sequence[int]]) -> None:
        for position, experts in enumerate(executed):
            for expert in experts:
                self._last.setdefault(layer, {})[expert] = (step, position)

    def residents(self, layer: int) -> set[int]:
        last = self._last.get(layer, {})
        latest_first = sorted(last, key=lambda e: (-last[e][0], -last[e][1], e))
        return set(latest_first[: self._capacity])


def test_what_is_executed_is_the_references_choice(
    checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole text: weights from the rates so far, pools from what ran, sets from the plain reference."""
    listener, capacity, k = Listener(monkeypatch), 6, 6
    with load(checkpoint("Qwen3Moe"), {**NARROW, "capacity": capacity}) as engine:
        drafts: list[tuple[int, int]] = []

        def counting(num_tokens: int, *, accepted: int, seconds: float) -> None:
            drafts.append((num_tokens, accepted))

        monkeypatch.setattr(engine._shared.stats, "drafted", counting)
        engine.generate(REPEATED, max_tokens=40, ignore_eos=True)
    shape = Shape(3, 16, 4)
    policy, rates, pool = BlockSelection(**NARROW), CommitmentRates(k), ReferencePool(capacity)
    passes = [
        listener.heard[i : i + shape.num_layers] for i in range(0, len(listener.heard), shape.num_layers)
    ]
    assert len(passes) == len(drafts) + 1
    for layer, said, executed in passes[0]:
        assert torch.equal(executed, said.own), "a prompt is routed as the router says"
        pool.read(layer, 0, executed.tolist())
    for step, (heard, (num_drafted, num_accepted)) in enumerate(zip(passes[1:], drafts, strict=True), 1):
        weights = rates.weights(num_drafted).tolist()
        for layer, said, executed in heard:
            scores = said.scores.numpy().astype(np.float32)
            expected = block_reference.select(
                policy,
                scores,
                shares_of(scores),
                said.own.tolist(),
                weights=weights,
                resident=pool.residents(layer),
            )
            assert executed.tolist() == expected
            pool.read(layer, step, expected)
        rates.observe(num_drafted, num_accepted)
    assert any(num_drafted for num_drafted, _ in drafts)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"speculation": {"drafter": "none"}}, r"block_selection chooses experts for the tokens of a draft"),
        ({"eviction": {"policy": "logical"}}, r"routing\.policy: block_selection has none"),
        (
            {"routing": {"policy": "exact", "growth": 2.0}},
            r"routing\.growth: 2\.0 is for routing\.policy: block",
        ),
        (
            {"routing": {"policy": "cache_prior"}},
            r"cache_prior with speculation\.drafter: prompt_lookup is not",
        ),
        ({"routing": {"policy": "block_selection", "capacity": 2}}, r"routing\.capacity=2"),
    ],
)
def test_settings_that_clash(sections: dict[str, Any], message: str, checkpoint: MakeCheckpoint) -> None:
    with pytest.raises(ConfigError, match=message):
        load(checkpoint("Qwen3Moe"), {}, **sections)


def test_texts_that_are_given_have_no_drafts(checkpoint: MakeCheckpoint) -> None:
    with (
        load(checkpoint("Qwen3Moe"), {}) as engine,
        pytest.raises(ConfigError, match="let the engine answer"),
    ):
        Harness(engine._parts)
