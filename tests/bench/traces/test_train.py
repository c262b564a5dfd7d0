"""Training of a narrow model on a CPU: a few steps, a look, a checkpoint, and going on from it."""

from __future__ import annotations

import copy
import itertools
import json
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bench.models.fast_forward import install_fast_forward
from bench.models.model import build_model
from bench.models.streams import Stream
from bench.traces.forward import hidden_states, keep_routers_precise
from bench.traces.look import Look, Watcher
from bench.traces.objective import Coefficients, Objective, Wants
from bench.traces.terms import Companion, RouterTap
from bench.traces.train import STATE, Run, Trainer, fit, summary
from tests.bench.traces.test_pack import stream
from tests.bench.traces.test_terms import TINY

CPU = torch.device("cpu")
STEP_S = 0.01
"""What a step takes by the clock of these tests."""
RUN = Run(seconds=1.5, batch=4, length=16, looked_length=16, look_seconds=0.3)
MATCHED = Wants(lru=(60.0, 80.0), foreseen=0.9, ahead=2)


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, a run has as many steps, and a look is over when the next step begins."""
    ticks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: STEP_S * next(ticks))
    monkeypatch.setattr("bench.traces.train.time", clock)
    look = Watcher.look

    def look_at_once(watcher: Watcher) -> Future[Look]:
        looking = look(watcher)
        looking.result()
        return looking

    monkeypatch.setattr(Watcher, "look", look_at_once)


@pytest.fixture(scope="module")
def streams() -> list[Stream]:
    """Two kinds of text that count upwards, in ids below the tiny vocabulary."""
    made = [stream("story.a", 60), stream("code.b", 60), stream("code.b", 20, is_held_out=True)]
    return [Stream(each.label, each.is_held_out, each.tokens % 60) for each in made]


def test_forward_is_that_of_transformers() -> None:
    torch.manual_seed(0)
    model = build_model(TINY, CPU)
    windows = torch.randint(0, 64, (3, 9))
    expected = model.model(input_ids=windows, use_cache=False).last_hidden_state
    torch.testing.assert_close(hidden_states(model, windows), expected)


def test_routers_compute_in_float32_under_autocast() -> None:
    torch.manual_seed(0)
    model = build_model(TINY, CPU)
    keep_routers_precise(model)
    heard: list[tuple[torch.Tensor, torch.Tensor]] = []
    gate = model.model.layers[1].mlp.gate
    gate.register_forward_hook(lambda _, inputs, outputs: heard.append((inputs[0], outputs[0])))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        hidden_states(model, torch.randint(0, 64, (3, 9)))
    hidden, logits = heard[0]
    assert len(heard) == 1
    torch.testing.assert_close(logits, hidden.float().flatten(0, -2) @ gate.weight.T)


def test_a_look_is_at_each_document_by_itself() -> None:
    """What pads short ones counts nowhere."""
    torch.manual_seed(0)
    model, companion = build_model(TINY, CPU), Companion(TINY, ahead=2, width=32)
    documents = [np.random.default_rng(size).integers(0, 64, size) for size in (16, 5, 11)]
    tap, looks = RouterTap(model), []
    for part in (documents, *([document] for document in documents)):
        watcher = Watcher(model, tap, part, companion)
        looks.append(watcher.look().result())
        watcher.close()
    together, apart = looks[0], looks[1:]
    foreseen = [look.foreseen for look in apart if look.foreseen is not None]
    assert together.loss == pytest.approx(np.average([look.loss for look in apart], weights=[15, 4, 10]))
    assert together.foreseen == pytest.approx(np.average(foreseen, weights=[14, 3, 9]))


@pytest.mark.parametrize("wants", [Wants(), Wants(lru=(74.0, 88.0)), MATCHED], ids=["natural", "lru", "both"])
def test_objective_in_half_precision_as_on_a_gpu(wants: Wants) -> None:
    """Mixed dtypes that autocast would trip over show on a CPU too."""
    torch.manual_seed(0)
    model = build_model(TINY, CPU)
    install_fast_forward(model)
    companion = None if wants.foreseen is None else Companion(TINY, width=32)
    objective = Objective(model, RouterTap(model), Coefficients(wants, CPU), companion)
    with torch.autocast("cpu", torch.bfloat16):
        loss, cross_entropy = objective(torch.randint(0, 64, (3, 17)))
    loss.backward()
    assert loss > cross_entropy
    gate = model.model.layers[0].mlp.gate.weight
    assert gate.grad is not None and gate.grad.abs().sum() > 0
    for weight in [] if companion is None else companion.parameters():
        assert weight.grad is not None and torch.isfinite(weight.grad).all()


def test_foresight_teaches_the_companion_and_pulls_the_routers_apart() -> None:
    """What the coefficient scales is the pull alone."""
    torch.manual_seed(0)
    model, companion = build_model(TINY, CPU), Companion(TINY, width=32)
    coefficients = Coefficients(MATCHED, CPU)
    objective = Objective(model, RouterTap(model), coefficients, companion)
    windows, gradients = torch.randint(0, 64, (3, 17)), []
    for strength in (0.01, 0.5):
        coefficients.values["foresight"].fill_(strength)
        model.zero_grad()
        companion.zero_grad()
        objective(windows)[0].backward()
        gate, head = model.model.layers[1].mlp.gate.weight.grad, companion.models[0].head.weight.grad
        assert gate is not None and head is not None
        gradients.append((gate.clone(), head.clone()))
    torch.testing.assert_close(gradients[0][1], gradients[1][1])
    assert not torch.allclose(gradients[0][0], gradients[1][0])


def test_a_run_looks_steers_and_is_kept(
    streams: list[Stream], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    trainer = Trainer(TINY, streams, wants=MATCHED, run=RUN)
    fit(trainer, tmp_path)
    assert "LRU" in capsys.readouterr().out
    looks = trainer.looks
    assert len(looks) >= 2
    assert looks[-1]["consistency"] != looks[0]["consistency"]
    assert 0 <= looks[-1]["foreseen"] <= 1
    assert (tmp_path / STATE).exists() and (tmp_path / "config.json").exists()
    told = json.loads(json.dumps(summary(trainer, "tiny")))
    assert told["progress"]["steps"] == trainer.progress.steps > 0
    assert told["kinds"] == sorted({stream.kind for stream in streams})


def test_a_run_goes_on_where_it_was_kept(streams: list[Stream], tmp_path: Path) -> None:
    torch.manual_seed(0)
    first = Trainer(TINY, streams, wants=MATCHED, run=RUN)
    for progress in first.train():
        if progress.steps == 3:
            first.save(tmp_path)
            kept = copy.deepcopy(first.model.state_dict())
    again = Trainer(TINY, streams, wants=MATCHED, run=RUN)
    again.resume(tmp_path)
    assert again.progress.steps == 3
    assert all(torch.equal(kept[name], weight) for name, weight in again.model.state_dict().items())
    fit(again, tmp_path)
    assert again.progress.steps > 3
    assert again.progress.seconds >= RUN.seconds


def test_a_matched_run_begins_with_natural_weights(streams: list[Stream], tmp_path: Path) -> None:
    natural = Trainer(TINY, streams, wants=Wants(), run=RUN)
    natural.save(tmp_path)
    matched = Trainer(TINY, streams, wants=MATCHED, run=RUN)
    matched.start_from(tmp_path)
    assert matched.progress.steps == 0
    for name, weight in natural.model.state_dict().items():
        assert torch.equal(matched.model.state_dict()[name], weight)
