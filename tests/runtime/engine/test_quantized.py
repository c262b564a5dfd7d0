"""An engine whose experts are quantised while they are loaded.

It must say, in every bit, what transformers says with the weights that the quantised ones stand for; and that
must be near what it says with the checkpoint's own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from hetero_runtime.experts.store import load_store
from hetero_runtime.hf.conversion import expert_modules
from hetero_scheduler.keys import ExpertKey
from tests.architectures import reference_model
from tests.runtime.engine.answers import Answer, aligned, assert_same_answer, transformers_answer
from tests.runtime.engine.conftest import NUM_TOKENS, PROMPT, MakeCheckpoint
from tests.runtime.engine.test_exactness import load
from tests.runtime.engine.test_in_place import assert_close
from tests.runtime.engine.test_in_place import load as load_in_place
from tests.runtime.experts.loading import split

MOST_OFF = {"bf16": 0.02, "int8": 0.05, "fp8": 0.2, "int4": 0.5}
"""Root mean square difference of the logits after the prompt, over that of the logits. Tiny random models
magnify the error of their weights, since they route by nothing but noise."""


def with_weights_of(folder: Path, experts: str) -> transformers.PreTrainedModel:
    """Plain transformers with experts as `experts` stands for them."""
    model = reference_model(folder)
    store = load_store(split(folder).experts, threads=2, experts=experts)  # type: ignore[arg-type]
    for layer, module in enumerate(expert_modules(model).values()):
        for expert in range(store.num_experts):
            params = store.materialize(store.record(ExpertKey(layer, expert)), torch.float32)
            for name, value in params.items():
                module.get_parameter(name).data[expert] = value
    store.close()
    return aligned(model)


@pytest.mark.parametrize(
    ("name", "experts"),
    [*(("Qwen3Moe", experts) for experts in MOST_OFF), ("GptOss", "int4"), ("DeepseekV4", "fp8")],
)
def test_it_says_what_transformers_says_with_the_same_weights(
    name: str, experts: str, checkpoint: MakeCheckpoint, logits: list[torch.Tensor]
) -> None:
    folder = checkpoint(name)
    with load(folder, "cpu", model={"experts": experts}, memory={"residency": 0.25}) as engine:
        completion = engine.generate(PROMPT[0].tolist(), max_tokens=NUM_TOKENS, ignore_eos=True)
        errors = engine.weight_errors()
        engine.check()
    reference = with_weights_of(folder, experts)
    expected = transformers_answer(reference, {"input_ids": PROMPT}, num_tokens=NUM_TOKENS)
    assert_same_answer(completion.token_ids, logits, expected, device="cpu")
    assert errors is not None and min(errors) > 0
    plain = transformers_answer(aligned(reference_model(folder)), {"input_ids": PROMPT}, num_tokens=1)
    assert _difference(plain, logits[0].cpu()) < MOST_OFF[experts]


@pytest.mark.parametrize(("name", "experts"), [("GptOss", "int4"), ("Qwen3Moe", "fp8")])
def test_misses_are_computed_on_the_cpu_from_the_same_records(
    name: str, experts: str, checkpoint: MakeCheckpoint, logits: list[torch.Tensor]
) -> None:
    folder = checkpoint(name)
    with load_in_place(folder, "cpu", model={"experts": experts}) as engine:
        completion = engine.generate(PROMPT[0].tolist(), max_tokens=NUM_TOKENS, ignore_eos=True)
        assert engine.stats().decode.in_place.experts > 0
    reference = with_weights_of(folder, experts)
    expected = transformers_answer(reference, {"input_ids": PROMPT}, num_tokens=NUM_TOKENS)
    assert_close(completion.token_ids, logits, expected)


def _difference(plain: Answer, logits: torch.Tensor) -> float:
    return float((logits - plain.logits[0]).norm() / plain.logits[0].norm())
