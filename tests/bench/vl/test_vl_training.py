"""A toy run from pictures to a published folder: forward, loss, saving, and the engine's answers."""

from __future__ import annotations

import io
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from transformers import Qwen3VLMoeForConditionalGeneration

from bench.models.fast_forward import install_fast_forward
from bench.vl.batches import DeviceBatches
from bench.vl.drawing import NUM_CELLS
from bench.vl.evaluate import answered_rightly, evaluate
from bench.vl.forward import BatchForward
from bench.vl.geometry import Geometry, build_model
from bench.vl.model_card import read_summary
from bench.vl.objective import Objective, salience_loss
from bench.vl.pool import CHUNK, PicturePool
from bench.vl.questions import KINDS
from bench.vl.saving import NUM_PARTS, image_processor
from bench.vl.text import NO_TARGET, PAD_SEGMENT, PREFIX_LENGTH, prefix_ids
from bench.vl.train import train
from bench.vl.trainer import Run, Trainer
from hetero_runtime import Engine

CPU = torch.device("cpu")
RUN = Run(
    seconds=4.0,
    reserved_s=3.0,
    batch=4,
    peak_rate=0.1,
    chunks=1,
    held_chunks=1,
    processes=1,
    save_seconds=1e9,
)


@pytest.fixture(scope="module")
def pool(tokenizer: Tokenizer) -> Iterator[PicturePool]:
    with PicturePool("train", 1, tokenizer=tokenizer, seed=0, num_processes=1) as pool:
        pool.wait(1)
        yield pool


@pytest.fixture(scope="module")
def published(tokenizer: Tokenizer, geometry: Geometry, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train(geometry, run=RUN, out=folder / "model", parts=folder / "parts", begun=time.monotonic())
    return folder / "model"


def widened(model: Qwen3VLMoeForConditionalGeneration) -> Qwen3VLMoeForConditionalGeneration:
    """Larger weights, so that what one token does to another shows."""
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data.mul_(6)
    return model.eval()


@torch.no_grad()
def test_the_batched_forward_is_transformers_own(
    pool: PicturePool, tokenizer: Tokenizer, geometry: Geometry
) -> None:
    torch.manual_seed(0)
    model, prefix = widened(build_model(geometry, tokenizer, CPU)), prefix_ids(tokenizer)
    rows = torch.from_numpy(pool.drawn.rows[:2, 0]).long()
    forward = BatchForward(model, prefix)
    outputs = forward(torch.from_numpy(pool.drawn.pixels[:2]), rows)
    forward.close()
    logits = model.lm_head(outputs.hidden)
    assert outputs.router_logits.shape == (3, 2 * (PREFIX_LENGTH + rows.shape[2]), 8)
    for picture in range(2):
        pixels = image_processor()(images=[Image.fromarray(pool.drawn.pixels[picture])], return_tensors="pt")
        for segment in set(rows[picture, 1].tolist()) - {PAD_SEGMENT}:
            is_own = rows[picture, 1] == segment
            ids = torch.tensor([prefix + rows[picture, 0][is_own].tolist()])
            types = (ids == model.config.image_token_id).int()
            plain = model(input_ids=ids, mm_token_type_ids=types, **pixels).logits[0, PREFIX_LENGTH:]
            assert plain.std() > 0.1
            torch.testing.assert_close(logits[picture][is_own], plain, atol=2e-4, rtol=1e-3)


def test_fast_experts_give_the_same_gradients(
    pool: PicturePool, tokenizer: Tokenizer, geometry: Geometry
) -> None:
    torch.manual_seed(0)
    model = build_model(geometry, tokenizer, CPU)
    batch = _batch(pool)
    results = []
    for is_fast in (False, True):
        if is_fast:
            install_fast_forward(model)
        torch.manual_seed(1)
        objective = Objective(model, BatchForward(model, prefix_ids(tokenizer)), balance=0.02)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            losses = objective(*batch)
        losses.total.backward()
        grads = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        results.append((losses.total.item(), grads))
    (plain, plain_grads), (fast, fast_grads) = results
    assert fast == pytest.approx(plain, rel=2e-3)
    assert set(plain_grads) == set(fast_grads) == {name for name, _ in model.named_parameters()}
    for name, gradient in plain_grads.items():  # in bfloat16 a few tokens choose another expert
        assert (fast_grads[name] - gradient).norm() <= 0.15 * gradient.norm() + 1e-6, name


def _batch(pool: PicturePool) -> tuple[torch.Tensor, ...]:
    batches = DeviceBatches(pool, CPU, seed=0)
    batches.fetch(1)
    assert batches.num_pictures == CHUNK
    return batches.draw(2)


def test_steps_lower_both_losses(pool: PicturePool, tokenizer: Tokenizer, geometry: Geometry) -> None:
    torch.manual_seed(0)
    trainer = Trainer(geometry, tokenizer, pool=pool, run=RUN)
    batch = _batch(pool)
    with torch.no_grad():
        before = trainer.objective(*batch)
    for progress in trainer.train(time.monotonic() + 3600):  # so far off that the rate hardly moves
        if progress.steps == 25:
            break
    with torch.no_grad():
        after = trainer.objective(*batch)
    assert progress.pictures == 25 * RUN.batch
    assert after.answers < before.answers - 1.0
    assert after.cells < before.cells - 1.0
    assert after.salience < before.salience


def test_attention_on_things_is_what_salience_wants() -> None:
    cells = torch.zeros(1, NUM_CELLS, 3, dtype=torch.long)
    cells[0, :4, 0] = 3
    on_things, elsewhere = torch.zeros(2, 1, NUM_CELLS)
    on_things[0, :4], elsewhere[0, -4:] = 0.25, 0.25
    assert salience_loss(on_things, cells) == pytest.approx(np.log(4), abs=1e-4)
    assert salience_loss(elsewhere, cells) > 10
    assert salience_loss(on_things, torch.zeros_like(cells)) == 0


def test_an_answer_is_right_when_all_of_it_is() -> None:
    rows = torch.zeros(1, 4, 6, dtype=torch.long)
    rows[0, 1] = torch.tensor([1, 1, 1, 2, 2, PAD_SEGMENT])
    rows[0, 3] = torch.tensor([NO_TARGET, 5, 6, 7, 8, NO_TARGET])
    said = torch.tensor([[9, 5, 6, 7, 9, 9]])
    is_right = answered_rightly(torch.nn.functional.one_hot(said, 10), rows)
    assert is_right[0, :2].tolist() == [True, False]


def test_evaluation_counts_every_question(
    pool: PicturePool, tokenizer: Tokenizer, geometry: Geometry
) -> None:
    model = build_model(geometry, tokenizer, CPU)
    report = evaluate(model, prefix_ids(tokenizer), pool.drawn, num_pictures=40)
    kinds = pool.drawn.kinds[:40, 0]
    assert [report.asked[kind] for kind in KINDS] == [
        int((kinds == index).sum()) for index in range(len(KINDS))
    ]
    assert all(0 <= report.right[kind] <= report.asked[kind] for kind in KINDS)
    assert len(report.load_entropy) == geometry.layers
    assert 0 < report.text_entropy <= 1


def test_the_pool_is_the_same_whoever_draws_it(pool: PicturePool, tokenizer: Tokenizer) -> None:
    with PicturePool("train", 1, tokenizer=tokenizer, seed=0, num_processes=2) as again:
        again.wait(1)
        for one, other in zip(pool.drawn, again.drawn, strict=True):
            assert np.array_equal(one, other)


def test_a_run_leaves_folder_card_and_parts(published: Path) -> None:
    parts = sorted((published.parent / "parts").iterdir())
    assert [path.name for path in parts] == [f"model.tar.{part}" for part in range(NUM_PARTS)]
    with tarfile.open(fileobj=io.BytesIO(b"".join(path.read_bytes() for path in parts))) as tar:
        inside = {member.name for member in tar.getmembers() if member.isfile()}
    assert inside == {f"model/{path.name}" for path in published.iterdir()}
    summary = read_summary(published / "train.json")
    assert set(summary.held_out) == {"seeds", "combinations"}
    assert summary.held_out["seeds"].asked["count"] > 0
    assert "## Held-out accuracy" in (published / "MODEL_CARD.md").read_text()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_engine_answers_as_transformers_does(
    published: Path, pool: PicturePool, load_processor: Any
) -> None:
    picture = Image.fromarray(pool.drawn.pixels[0])
    content = [{"type": "image", "image": picture}, {"type": "text", "text": "What do you see?"}]
    messages = [{"role": "user", "content": content}]
    processor = load_processor(published)
    inputs = processor.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    model = Qwen3VLMoeForConditionalGeneration.from_pretrained(published, dtype=torch.float32)
    written = model.generate(**inputs, max_new_tokens=12, min_new_tokens=12)[
        0, inputs["input_ids"].shape[1] :
    ]
    with Engine.load(
        published,
        device="cpu",
        model={"dtype": "float32"},
        memory={"residency": 0.5},
        execution={"max_length": 256, "max_rows": 1},
    ) as engine:
        completion = engine.generate(messages, max_tokens=12, temperature=0.0, ignore_eos=True)
        engine.check()
    assert completion.prompt_tokens == inputs["input_ids"].shape[1]
    assert list(completion.token_ids) == written.tolist()
