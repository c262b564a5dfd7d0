"""A trace holds what the model did: the experts that ran, and the logits of plain transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetero_runtime.errors import CheckpointError, RequestCancelled, RequestError
from hetero_runtime.generation import CancelToken
from hetero_runtime.hf.forward import SequenceState
from hetero_runtime.hf.reference import load_reference
from hetero_runtime.hf.router_hooks import routed_layers
from hetero_runtime.hf.routing_record import record_routing
from hetero_runtime.orchestrator.eager import EagerOrchestrator
from hetero_runtime.trace import read_trace
from hetero_runtime.trace.progress import TraceProgress, Watch
from tests.architectures import ARCHITECTURES
from tests.runtime.trace.conftest import TEXTS, MakeConfig, Record

LEFT_OUT = ("DeepseekV4", "Qwen3MoeFp8Ragged")
"""A layer chooses by token id; plain transformers cannot load the checkpoint."""
NAMES = tuple(name for name in ARCHITECTURES if name not in LEFT_OUT)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[np.ndarray[Any, Any]]]:
    """By layer: what the experts function was asked to run, `[tokens, top_k]` a pass."""
    seen: dict[int, list[np.ndarray[Any, Any]]] = {}
    run_layer = EagerOrchestrator.run_layer

    def spy(self: EagerOrchestrator, layer: int, hidden: Any, index: Any, weights: Any) -> torch.Tensor:
        seen.setdefault(layer, []).append(index.numpy().copy())
        return run_layer(self, layer, hidden, index, weights)

    monkeypatch.setattr(EagerOrchestrator, "run_layer", spy)
    return seen


@pytest.mark.parametrize("name", NAMES)
def test_topk_is_what_ran_and_logits_are_those_of_the_plain_model(
    name: str, record: Record, ran: dict[int, list[np.ndarray[Any, Any]]], config_of: MakeConfig
) -> None:
    trace, _ = record(name, is_teacher_forced=True)
    for layer in range(trace.num_layers):
        assert np.array_equal(trace.topk[:, layer], np.concatenate(ran[layer]))
    config = config_of(name)
    plain = load_reference(config.model.path, dtype=config.model.dtype, device=torch.device("cpu"))
    for begin, end in zip(trace.bounds[:-1], trace.bounds[1:], strict=True):
        with record_routing(plain) as routing:
            SequenceState(plain).extend(torch.from_numpy(trace.tokens[begin:end]).long())
        expected = routing.take()
        assert np.array_equal(trace.logits[begin:end], expected.logits.numpy())
        assert np.array_equal(trace.topk[begin:end], expected.top_k.numpy())


def test_with_groups_and_biases_the_choice_is_not_the_top_of_the_logits(record: Record) -> None:
    trace, _ = record("DeepseekV3", is_teacher_forced=True)
    highest = np.argsort(-trace.logits.astype(np.float32), axis=-1)[..., : trace.top_k]
    assert (np.sort(highest, axis=-1) != np.sort(trace.topk, axis=-1)).any()


def test_routers_asked_early_say_what_they_would_on_that_input(record: Record, config_of: MakeConfig) -> None:
    trace, _ = record(texts=TEXTS[:1], is_teacher_forced=True, asks_early=True)
    config = config_of("Qwen3Moe")
    plain = load_reference(config.model.path, dtype=config.model.dtype, device=torch.device("cpu"))
    inputs: list[torch.Tensor] = []
    layers = routed_layers(plain)
    for layer in layers:
        layer.router.register_forward_pre_hook(lambda _module, given: inputs.append(given[0]))
    SequenceState(plain).extend(torch.from_numpy(trace.tokens).long())
    assert trace.early is not None
    assert not trace.early[:, 0].any()
    for index, following in enumerate(layers[1:]):
        with torch.inference_mode():
            asked, _, _ = following.router(inputs[index])
        np.testing.assert_array_equal(trace.early[:, index + 1], asked.half().numpy())


def test_parts_with_and_without_early_routers_do_not_mix(record: Record, tmp_path: Path) -> None:
    cancel = CancelToken()

    def stop(at: TraceProgress) -> None:
        if at.documents == 1:
            cancel.cancel()

    with pytest.raises(RequestCancelled):
        record(watch=Watch(recording=stop, cancel=cancel))
    with pytest.raises(RequestError, match="was made without --early"):
        record(asks_early=True)
    assert (tmp_path / "out.safetensors.parts").exists()


def test_logits_are_those_that_transformers_itself_reports(record: Record, config_of: MakeConfig) -> None:
    trace, _ = record(texts=TEXTS[:1], is_teacher_forced=True)
    config = config_of("Qwen3Moe")
    plain = load_reference(config.model.path, dtype=config.model.dtype, device=torch.device("cpu"))
    with torch.inference_mode():
        ids = torch.from_numpy(trace.tokens).long()[None]
        reported = plain(input_ids=ids, output_router_logits=True).router_logits
    assert np.array_equal(trace.logits, torch.stack(reported, dim=1).half().numpy())


def test_a_document_is_its_text_and_what_the_model_says_next(record: Record, tmp_path: Path) -> None:
    trace, info = record(seed=3)
    assert (info.decoding, info.temperature, info.seed, info.max_tokens) == ("sampled", 0.8, 3, 6)
    lengths = np.diff(trace.bounds)
    assert lengths.tolist() == [len(text.encode()) + 6 for text in TEXTS]  # the tiny tokenizer reads bytes
    again, _ = read_trace(tmp_path / "out.safetensors")
    assert np.array_equal(again.tokens, trace.tokens)
    assert not (tmp_path / "out.safetensors.parts").exists()


def test_greedy_and_teacher_forced_are_named_so(record: Record, tmp_path: Path) -> None:
    assert record(texts=TEXTS[:1], temperature=0).info.decoding == "greedy"
    (tmp_path / "out.safetensors").unlink()
    trace, info = record(is_teacher_forced=True, cut=5)
    assert (info.decoding, info.seed, info.max_tokens) == ("teacher-forced", None, 0)
    assert np.diff(trace.bounds).tolist() == [5, 5, 5]


# ---- an interruption


def test_a_cancelled_recording_goes_on_where_it_stopped(record: Record, tmp_path: Path) -> None:
    whole, _ = record()
    (tmp_path / "out.safetensors").unlink()
    cancel, seen = CancelToken(), []

    def stop_in_the_second_document(at: TraceProgress) -> None:
        seen.append(at)
        if at.documents == 1 and at.tokens == 9:
            cancel.cancel()

    with pytest.raises(RequestCancelled, match="documents kept: 1"):
        record(watch=Watch(recording=stop_in_the_second_document, cancel=cancel))
    assert [path.name for path in (tmp_path / "out.safetensors.parts").iterdir()] == ["00000.safetensors"]
    assert seen[0].left_s is None
    assert (seen[-1].documents, seen[-1].num_documents) == (1, 3)
    rest: list[TraceProgress] = []
    resumed, _ = record(watch=Watch(recording=rest.append))
    assert (rest[0].documents, rest[0].tokens) == (1, 0)
    assert (rest[-1].documents, rest[-1].tokens, rest[-1].left_s) == (3, 12, 0.0)
    for ours, theirs in ((resumed.tokens, whole.tokens), (resumed.logits, whole.logits)):
        assert np.array_equal(ours, theirs)


def test_cancelling_before_the_listening_pass_keeps_nothing_half(record: Record, tmp_path: Path) -> None:
    cancel = CancelToken()
    cancel.cancel()
    with pytest.raises(RequestCancelled, match="documents kept: 0"):
        record(is_teacher_forced=True, watch=Watch(cancel=cancel))
    assert list((tmp_path / "out.safetensors.parts").iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.7}, r"temperature 0\.8, now it is 0\.7"),
        ({"max_tokens": 7}, "max_tokens 6, now it is 7"),
        ({"cut": 20}, "cut None, now it is 20"),
        ({"texts": ("Another text.", *TEXTS[1:])}, "another text than document 1 is now"),
        ({"name": "Olmoe"}, "was made with model"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_parts_made_otherwise_are_refused(changes: dict[str, Any], message: str, record: Record) -> None:
    _interrupt_after_one(record)
    with pytest.raises(RequestError, match=message):
        record(**changes)


def test_documents_may_be_added_but_not_taken_away(record: Record) -> None:
    _interrupt_after_one(record)
    _interrupt_after_one(record)
    with pytest.raises(RequestError, match="documents now: 1"):
        record(texts=TEXTS[:1])
    trace, _ = record(texts=(*TEXTS, "One more."))
    assert len(trace.bounds) == 5


def _interrupt_after_one(record: Record) -> None:
    cancel, first = CancelToken(), []

    def stop(at: TraceProgress) -> None:
        first.append(at.documents)
        if at.documents > first[0]:
            cancel.cancel()

    with pytest.raises(RequestCancelled):
        record(watch=Watch(recording=stop, cancel=cancel))


# ---- refusals, before anything is loaded


def test_a_layer_that_chooses_by_token_id_is_named(record: Record) -> None:
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp: chooses experts by token id"):
        record("DeepseekV4")


def test_what_exists_is_not_written_over(record: Record, tmp_path: Path) -> None:
    (tmp_path / "out.safetensors").write_text("mine")
    with pytest.raises(RequestError, match="exists already"):
        record()
    assert (tmp_path / "out.safetensors").read_text() == "mine"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 120}, "document 1 has 24 tokens, and 120 are to be generated: over .*--cut 8"),
        ({"temperature": -1.0}, "temperature"),
        ({"cut": 0}, "cut is 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_that_cannot_be_are_refused(
    settings: dict[str, Any], message: str, record: Record, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match=message):
        record(**settings)
    assert list(tmp_path.iterdir()) == []


def test_logits_beyond_float16_are_refused_with_the_layer(config_of: MakeConfig) -> None:
    config = config_of("Qwen3Moe")
    plain = load_reference(config.model.path, dtype="float32", device=torch.device("cpu"))
    with torch.no_grad():
        routed_layers(plain)[1].router.weight.mul_(1e6)
    with record_routing(plain) as routing, torch.inference_mode():
        plain(input_ids=torch.tensor([[9, 10, 11]]))
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp: router logits reach"):
        routing.take()


def test_nothing_is_recorded_once_the_context_is_left(config_of: MakeConfig) -> None:
    config = config_of("Qwen3Moe")
    plain = load_reference(config.model.path, dtype="float32", device=torch.device("cpu"))
    with record_routing(plain) as routing, torch.inference_mode():
        plain(input_ids=torch.tensor([[9, 10]]))
        plain(input_ids=torch.tensor([[11]]))
    assert len(routing.take().logits) == 3
    with torch.inference_mode():
        plain(input_ids=torch.tensor([[9, 10]]))
    assert routing._logits == [[], [], []]
