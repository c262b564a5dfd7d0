"""Routers that are told what to choose: what changes, and what does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from hetero_runtime.errors import CheckpointError
from hetero_runtime.hf.architectures import COVERED
from hetero_runtime.hf.reference import load_reference
from hetero_runtime.hf.router_choice import RouterScores, let_choose
from hetero_runtime.hf.router_hooks import routed_layers, router_top_k
from hetero_runtime.hf.routing_record import record_routing
from tests.architectures import ARCHITECTURES, QUANTIZED, build_checkpoint, prompt_ids, reference_model
from tests.deepseek_vl2_checkpoints import VARIANTS, build_deepseek_vl2

NAMES = [name for name in ARCHITECTURES if name not in (*QUANTIZED, "DeepseekV4")]
SIGMOID = ("DeepseekV3", "Moonlight", "Glm4Moe", "MiniMaxM2", "DeepseekVL2 large")


class Routed(NamedTuple):
    """A model whose routers have not been told anything yet."""

    name: str
    model: Any


@pytest.fixture(scope="module", params=[*NAMES, *(f"DeepseekVL2 {variant}" for variant in VARIANTS)])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Routed:
    folder = tmp_path_factory.mktemp("model")
    _, _, variant = request.param.partition(" ")
    if not variant:
        return Routed(request.param, reference_model(build_checkpoint(request.param, folder)))
    folder = build_deepseek_vl2(variant, folder)
    return Routed(request.param, load_reference(folder, dtype="float32", device=torch.device("cpu")))


@pytest.fixture
def routed(loaded: Routed) -> Iterator[Routed]:
    yield loaded
    for layer in routed_layers(loaded.model):
        layer.router.__dict__.pop("forward", None)
        layer.router._forward_hooks.clear()
        layer.experts._forward_pre_hooks.clear()


def _said(model: Any, ids: torch.Tensor, **choosing: Any) -> dict[int, tuple[RouterScores, Any]]:
    """By layer, what its router said and what it foresaw; `choose` says what is selected."""
    heard: dict[int, tuple[RouterScores, Any]] = {}
    choose = choosing.pop("choose", lambda _layer, said: said.own)

    def keep(layer: int, said: RouterScores, guess: torch.Tensor | None) -> torch.Tensor:
        heard[layer] = (said, guess)
        return choose(layer, said)

    let_choose(model, keep, looks_ahead=True)
    with torch.no_grad():
        model(input_ids=ids)
    return heard


def test_a_router_that_keeps_its_choice_changes_no_bit(routed: Routed) -> None:
    ids, model = prompt_ids(9), routed.model
    with torch.no_grad():
        before = model(input_ids=ids).logits
        heard = _said(model, ids)
        after = model(input_ids=ids).logits
    assert torch.equal(after, before)
    assert sorted(heard) == list(range(len(routed_layers(model))))
    for said, _ in heard.values():
        best = said.scores.topk(router_top_k(model), dim=-1).indices
        assert torch.equal(said.own.sort().values, best.sort().values), "scores rank as the router does"


def test_another_choice_keeps_the_unmodified_weights(routed: Routed) -> None:
    """Weights of other experts, in the proportions in which the router's own scores have them."""
    model, outputs = routed.model, {}
    for layer, each in enumerate(routed_layers(model)):
        each.router.register_forward_hook(
            lambda _m, _a, output, layer=layer: outputs.__setitem__(layer, output)
        )
    top_k = router_top_k(model)

    def next_best(_layer: int, said: RouterScores) -> torch.Tensor:
        num_eligible = int((said.scores != -torch.inf).sum(dim=-1).min())
        return said.scores.topk(min(top_k + 1, num_eligible), dim=-1).indices[:, -top_k:]

    heard = _said(model, prompt_ids(9), choose=next_best)
    has_sigmoid = routed.name in SIGMOID
    for layer, (logits, weights, experts) in outputs.items():
        assert torch.equal(experts, next_best(layer, heard[layer][0]))
        of_chosen = logits.float().gather(1, experts)
        plain = of_chosen.sigmoid() if has_sigmoid else of_chosen.softmax(dim=-1)
        torch.testing.assert_close(
            weights / weights.sum(-1, keepdim=True), plain / plain.sum(-1, keepdim=True)
        )


def test_a_guess_is_the_next_router_on_this_input(routed: Routed) -> None:
    model, has_sigmoid = routed.model, routed.name in SIGMOID
    inputs: dict[int, torch.Tensor] = {}
    layers = routed_layers(model)
    for index, each in enumerate(layers):
        each.experts.register_forward_pre_hook(
            lambda _module, arguments, index=index: inputs.__setitem__(index, arguments[0])
        )
    heard = _said(model, prompt_ids(9))
    assert heard[len(layers) - 1][1] is None
    for index in range(len(layers) - 1):
        said = heard[index + 1][0]
        guess = heard[index][1]
        assert guess.shape == said.scores.shape
        router = layers[index + 1].router
        logits = torch.nn.functional.linear(inputs[index], router.weight, getattr(router, "bias", None))
        is_eligible = guess != -torch.inf
        plain = logits.sigmoid() if has_sigmoid else logits
        offset = (guess - plain)[is_eligible]
        if not has_sigmoid:
            torch.testing.assert_close(offset, torch.zeros_like(offset), atol=1e-5, rtol=0)
        else:  # a correction bias an expert, the same for every token
            per_expert = torch.where(is_eligible, guess - plain, torch.nan)
            spread = per_expert.nan_to_num(-9).amax(0) - per_expert.nan_to_num(9).amin(0)
            assert spread[is_eligible.any(0)].abs().max() < 1e-5


def test_excluded_groups_cannot_be_chosen(tmp_path: Path) -> None:
    model = reference_model(build_checkpoint("DeepseekV3", tmp_path))
    for said, _ in _said(model, prompt_ids(9)).values():
        assert (said.scores == -torch.inf).sum(dim=-1).tolist() == [8] * 9, "two of four groups of four"


def test_what_is_recorded_is_what_was_chosen(tmp_path: Path) -> None:
    model = reference_model(build_checkpoint("Olmoe", tmp_path))
    let_choose(model, lambda _layer, said, _guess: (said.own + 1) % 16, looks_ahead=False)
    with record_routing(model) as record, torch.no_grad():
        model(input_ids=prompt_ids(5))
        top_k = record.take().top_k
    model = reference_model(tmp_path)
    with record_routing(model) as record, torch.no_grad():
        model(input_ids=prompt_ids(5))
        assert torch.equal(top_k[:, 0], (record.take().top_k[:, 0] + 1) % 16)


def test_every_covered_architecture_is_steerable_or_known_not_to_be() -> None:
    assert [name for name, each in COVERED.items() if not each.is_steerable] == ["DeepseekV4ForCausalLM"]


def test_a_router_without_its_top_k_is_refused(tmp_path: Path) -> None:
    model = reference_model(build_checkpoint("Olmoe", tmp_path))
    router = routed_layers(model)[0].router
    router.forward = lambda hidden: (hidden, hidden, hidden)
    let_choose(model, lambda _layer, said, _guess: said.own, looks_ahead=False)
    with torch.no_grad(), pytest.raises(CheckpointError, match="takes 0 top-k of 16 experts"):
        model(input_ids=prompt_ids(5))
