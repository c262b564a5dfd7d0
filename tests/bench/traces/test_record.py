"""Recording a tiny model: padding changes nothing, sampled text ends where it ends, files read as traces."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from bench.models.model import build_model
from bench.models.streams import Stream
from bench.traces.documents import choose_documents
from bench.traces.record import END, Listener, record
from hetero_runtime.trace import read_trace
from hetero_scheduler.predict.mamba2_training import _check_choices
from tests.bench.traces.test_pack import stream
from tests.bench.traces.test_terms import TINY


@pytest.fixture(scope="module")
def listener(tmp_path_factory: pytest.TempPathFactory) -> Listener:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model") / "tiny"
    build_model(TINY, torch.device("cpu")).save_pretrained(folder)
    return Listener(folder)


def documents(*sizes: int) -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [draw.integers(2, 64, size) for size in sizes]


def test_a_document_is_heard_alike_alone_and_among_longer_ones(listener: Listener) -> None:
    texts = documents(5, 20, 11)
    together, alone = listener.listen(texts), [listener.listen([text]) for text in texts]
    assert together.bounds.tolist() == [0, 5, 25, 36]
    logits = np.concatenate([each.logits for each in alone])
    np.testing.assert_allclose(together.logits, logits, atol=2e-3)
    early = np.concatenate([each.early for each in alone if each.early is not None])
    np.testing.assert_allclose(together.early, early, atol=2e-3)
    assert np.array_equal(together.tokens, np.concatenate(texts))
    _check_choices(together)


def test_early_is_the_next_router_on_the_input_of_the_layer_before(listener: Listener) -> None:
    heard: list[torch.Tensor] = []
    gates = [layer.mlp.gate for layer in listener.model.model.layers]
    handles = [gate.register_forward_hook(lambda _, inputs, __: heard.append(inputs[0])) for gate in gates]
    trace = listener.listen(documents(9))
    for handle in handles:
        handle.remove()
    assert trace.early is not None
    assert not trace.early[:, 0].any()
    for layer in range(1, len(gates)):
        said = heard[layer - 1].reshape(9, -1) @ gates[layer].weight.T
        np.testing.assert_allclose(trace.early[:, layer], said.detach().numpy(), atol=2e-3)
        assert np.abs(trace.early[:, layer] - trace.logits[:, layer]).max() > 0.01


def test_sampled_text_goes_on_from_its_beginning_and_repeats_with_its_seed(listener: Listener) -> None:
    prompts = documents(6, 6)
    written = listener.go_on(prompts, num_new=10, seed=3)
    again = listener.go_on(prompts, num_new=10, seed=3)
    for prompt, text, same in zip(prompts, written, again, strict=True):
        assert np.array_equal(text[:6], prompt)
        assert np.array_equal(text, same)
        assert 7 <= len(text) <= 16
        ends = np.flatnonzero(text[6:] == END)
        assert len(ends) == 0 or 6 + ends[0] == len(text) - 1


def test_what_is_recorded_is_a_trace_file(
    listener: Listener, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    info = listener.describe(decoding="sampled", seed=1, num_new=4, cut=5)
    trace = record(listener, documents(9, 9), tmp_path, info, name="sampled")
    read, read_info = read_trace(tmp_path / "sampled.safetensors")
    assert np.array_equal(read.topk, trace.topk)
    assert (read_info.decoding, read_info.temperature, read_info.max_tokens) == ("sampled", 0.8, 4)
    assert "sampled: 18 tokens, 2 documents, load entropy" in capsys.readouterr().out


def test_documents_are_mixed_cut_and_of_one_split() -> None:
    held = stream("story.a", 6, is_held_out=True, size=30)
    streams = [
        held,
        stream("code.b", 3, is_held_out=True, size=12),
        stream("prose.c", 9, size=30),
        Stream("chat.a", True, held.tokens),
    ]
    chosen = choose_documents(streams, 100, length=20, shortest=10, is_held_out=True)
    assert [len(text) for text in chosen] == [13, 20, 13, 20, 13, 20, 20, 20, 20]
    assert len(choose_documents(streams, 4, length=20, shortest=20, is_held_out=True)) == 4
    with pytest.raises(ValueError, match="no document has 90 tokens"):
        choose_documents(streams, 4, length=99, shortest=90, is_held_out=True)
