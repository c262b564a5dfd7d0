"""Training learns what can be learned, nothing where nothing can, and the same for the same seed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from hetero_scheduler.predict.losses import divergence_loss, prediction_loss, ranking_loss
from hetero_scheduler.predict.mamba2_block import Mamba2Sizes
from hetero_scheduler.predict.mamba2_model import GroupModel, GroupShape
from hetero_scheduler.predict.mamba2_training import PredictorShape, train_predictor
from hetero_scheduler.predict.recall import Recall, measure_recall
from hetero_scheduler.predict.training import (
    TrainingOptions,
    TrainingProgress,
    train_group,
    with_own_predictions,
)
from hetero_scheduler.predict.training_data import GroupData, split_documents
from hetero_scheduler.trace import Trace

LAYERS, EXPERTS, TOP_K, LENGTH = 2, 12, 2, 48
SHAPE = GroupShape(
    LAYERS, EXPERTS, TOP_K, sizes=Mamba2Sizes(d_model=48, state_size=16, head_dim=24, chunk=16)
)
OPTIONS = TrainingOptions(epochs=14, batch=8, learning_rate=5e-3)


def chained_trace(documents: int, seed: int = 0) -> Trace:
    """A layer's first expert fixes its second one and both of the next step."""
    draw = np.random.default_rng(seed)
    step = np.random.default_rng(99).permutation(EXPERTS)
    logits = draw.normal(scale=0.1, size=(documents, LENGTH, LAYERS, EXPERTS))
    main = draw.integers(EXPERTS, size=(documents, LAYERS))
    for position in range(LENGTH):
        for layer in range(LAYERS):
            rows = np.arange(documents)
            logits[rows, position, layer, main[:, layer]] += 4
            logits[rows, position, layer, (main[:, layer] + 3) % EXPERTS] += 3
        main = step[main]
    return as_trace(logits.reshape(-1, LAYERS, EXPERTS), documents)


def as_trace(logits: np.ndarray, documents: int) -> Trace:
    topk = np.argsort(-logits, axis=-1)[..., :TOP_K]
    tokens = np.zeros(len(logits), dtype=np.int32)
    return Trace(logits.astype(np.float16), topk, tokens, np.arange(documents + 1) * LENGTH)


def shuffled(trace: Trace) -> Trace:
    """The same steps in another order, document by document."""
    draw = np.random.default_rng(1)
    documents = zip(trace.bounds[:-1], trace.bounds[1:], strict=True)
    order = np.concatenate([draw.permutation(np.arange(first, last)) for first, last in documents])
    return Trace(trace.logits[order], trace.topk[order], trace.tokens[order], trace.bounds)


def learn(trace: Trace) -> tuple[GroupModel, dict[tuple[str, int], Recall], list[TrainingProgress]]:
    split, seen = split_documents(len(trace.bounds) - 1, held_out=0.1, seed=0), []
    data = GroupData(trace, range(LAYERS))
    model = train_group(SHAPE, data, split=split, options=OPTIONS, progress=seen.append)
    recalls = measure_recall([model], trace, train=split.train, test=split.test)
    return model, {(recall.predictor, recall.distance): recall for recall in recalls}, seen


def test_a_deterministic_routing_is_learned_eight_steps_ahead() -> None:
    _, recalls, seen = learn(chained_trace(60))
    assert recalls["mamba2", 1].at_k > 0.9
    assert recalls["mamba2", 8].at_k > 0.9
    assert recalls["persistence", 1].at_k < 0.5
    assert recalls["static", 1].at_k < 0.5
    assert seen[0].stage == "teacher forcing" and seen[-1].stage == "scheduled sampling"
    assert seen[-1].best_loss < 0.2 * seen[0].train_loss


def test_shuffled_steps_cannot_be_predicted() -> None:
    _, recalls, _ = learn(shuffled(chained_trace(60)))
    assert recalls["mamba2", 1].at_k < 0.5


def test_the_same_seed_gives_the_same_weights_and_leaves_torch_alone() -> None:
    trace = chained_trace(12)
    before = torch.random.get_rng_state()
    split, options = split_documents(12, held_out=0.1, seed=0), TrainingOptions(epochs=2)
    models = [
        train_group(SHAPE, GroupData(trace, range(LAYERS)), split=split, options=options) for _ in range(2)
    ]
    for name, tensor in models[0].state_dict().items():
        assert torch.equal(tensor, models[1].state_dict()[name]), name
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.gpu
def test_captured_updates_learn_as_others_do_and_the_same_for_the_same_seed() -> None:
    trace, options = chained_trace(23), TrainingOptions(epochs=3, batch=8)  # the last batch is not full
    split = split_documents(23, held_out=0.1, seed=0)

    def losses(device: str) -> tuple[list[TrainingProgress], GroupModel]:
        seen: list[TrainingProgress] = []
        data = GroupData(trace, range(LAYERS), device)
        return seen, train_group(SHAPE, data, split=split, options=options, progress=seen.append)

    by_host, _ = losses("cpu")
    (captured, model), (_, again) = losses("cuda"), losses("cuda")
    for one, other in zip(by_host, captured, strict=True):
        assert one.train_loss == pytest.approx(other.train_loss, rel=0.03), one.epoch
        assert one.validation_loss == pytest.approx(other.validation_loss, rel=0.03), one.epoch
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_documents_serve_once() -> None:
    split = split_documents(20, held_out=0.1, seed=3)
    assert sorted([*split.train, *split.validation, *split.test]) == list(range(20))
    assert (len(split.validation), len(split.test)) == (2, 2)
    with pytest.raises(ValueError, match="record more documents"):
        split_documents(2, held_out=0.1, seed=0)


def test_every_step_but_a_documents_first_is_a_target_once() -> None:
    data = GroupData(chained_trace(2), range(LAYERS))
    windows = data.windows(np.array([1, 0]), length=20)
    targets = [token for start, steps in windows for token in range(start + 1, start + steps)]
    assert sorted(targets) == [*range(1, LENGTH), *range(LENGTH + 1, 2 * LENGTH)]
    batch = data.batch(windows)
    assert batch.is_real.sum() == windows[:, 1].sum()


def test_documents_of_one_step_are_refused() -> None:
    logits = np.random.default_rng(0).normal(size=(4, LAYERS, EXPERTS))
    trace = Trace(
        logits.astype(np.float16), np.argsort(-logits)[..., :TOP_K], np.zeros(4, np.int32), np.arange(5)
    )
    with pytest.raises(ValueError, match="single step"):
        train_group(
            SHAPE,
            GroupData(trace, range(LAYERS)),
            split=split_documents(4, held_out=0.1, seed=0),
            options=OPTIONS,
        )


def test_routers_that_choose_by_more_than_logits_are_refused() -> None:
    trace = chained_trace(10)
    biased = replace(trace, topk=np.argsort(-trace.logits - 9.0 * (np.arange(EXPERTS) == 5))[..., :TOP_K])
    with pytest.raises(ValueError, match="choose by more than logits"):
        train_predictor(biased, PredictorShape(num_groups=1), options=OPTIONS)


def test_ranking_loss_looks_at_the_hardest_experts_left_out() -> None:
    logits = torch.tensor([5.0, 4.0, 3.5, -9.0, 0.0])
    # pairs (5, 3.5) (5, 0) (4, 3.5) (4, 0) at margin 1: only the third falls short, by 0.5
    torch.testing.assert_close(ranking_loss(logits, torch.tensor([0, 1])), torch.tensor(0.5 / 4))


def test_divergence_is_zero_for_the_truth_and_positive_otherwise() -> None:
    target = torch.tensor([0.7, 0.3, 0.0])
    torch.testing.assert_close(divergence_loss(target.log().clamp_min(-50), target), torch.tensor(0.0))
    assert divergence_loss(torch.zeros(3), target) > 0
    assert prediction_loss(torch.zeros(2, 3), target.expand(2, 3), torch.tensor([[0, 1]] * 2)).shape == (2,)


def test_own_predictions_replace_what_is_drawn_and_never_the_first_step() -> None:
    torch.manual_seed(0)
    model = GroupModel(SHAPE)
    batch = GroupData(chained_trace(1), range(LAYERS)).batch(np.array([[0, 6]]))
    draws = torch.tensor([[0.0, 0.9, 0.1, 0.9, 0.1, 0.9]])
    mixed = with_own_predictions(model, batch.states, 0.5, draws)
    is_same = (mixed == batch.states).flatten(2).all(-1)[0]
    assert is_same.tolist() == [True, True, False, True, False, True]
    assert ((mixed > 0).sum(-1) == TOP_K).all()
    assert model.training
