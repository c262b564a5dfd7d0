"""A block drafter in the engine: it hears what the model kept, and changes no token."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hetero_runtime.config import load_config
from hetero_runtime.engine import Engine
from hetero_runtime.errors import CheckpointError, ConfigError
from hetero_runtime.hf.hidden_states import HiddenStates
from hetero_runtime.plan.report import to_json
from hetero_runtime.planned import plan_for
from hetero_runtime.prediction.fingerprint import config_sha256
from hetero_runtime.speculation import Draft, repeats_first
from hetero_runtime.speculation.block import drafter as block_drafter
from hetero_runtime.speculation.block.file import read_network, write_network
from hetero_runtime.speculation.block.network import BlockNetwork
from tests.architectures import ARCHITECTURES
from tests.runtime.engine.conftest import NUM_TOKENS, PROMPT, MakeAnswer, MakeCheckpoint
from tests.runtime.engine.rest import assert_at_rest
from tests.runtime.engine.serving import OPTIONS, PROMPTS, Alone
from tests.runtime.speculation.block.shapes import tiny_shape

SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "memory": {"residency": 0.3},
    "execution": {"max_rows": 2, "max_length": 256},
}
Drafting = Callable[..., Engine]


def build_drafter(target: Path, folder: Path, **changed: Any) -> Path:
    """A drafter with random weights for the model in `target`; fields of BlockShape as keywords."""
    text = transformers.AutoConfig.from_pretrained(target).get_text_config(decoder=True)
    fields: dict[str, Any] = {
        "hidden": text.hidden_size,
        "num_target_layers": text.num_hidden_layers,
        "target_layers": (0, text.num_hidden_layers - 2),
        "block": 8,
        "context": 256,
    }
    torch.manual_seed(0)
    network = BlockNetwork(tiny_shape(**(fields | changed))).requires_grad_(False)
    network.fc.weight.normal_(std=0.5)
    write_network(network, folder, vocab_size=text.vocab_size)
    return folder


@pytest.fixture
def drafting(
    checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Drafting]:
    """`drafting("Qwen3Moe", k=4)`: an engine with a random drafter that is never too shy to draft, and never
    rests for long though it is never right."""
    monkeypatch.setattr(block_drafter, "LEAST_CHANCE", 0.0)
    monkeypatch.setattr(repeats_first, "LONGEST_REST", 1)
    engines: list[Engine] = []

    def start(name: str, *, k: int = 4, **sections: Any) -> Engine:
        folder = build_drafter(checkpoint(name), tmp_path / "drafter")
        speculation = {"drafter": "block", "model": str(folder), "k": k}
        engines.append(Engine.load(checkpoint(name), speculation=speculation, **(SETTINGS | sections)))
        return engines[-1]

    yield start
    for engine in engines:
        assert_at_rest(engine)
        engine.close()


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "DeepseekV4"])
def test_greedy_text_of_every_architecture(name: str, *, drafting: Drafting, answer: MakeAnswer) -> None:
    engine = drafting(name)
    completion = engine.generate(PROMPT[0].tolist(), max_tokens=NUM_TOKENS, ignore_eos=True)
    assert list(completion.token_ids) == answer(name, "cpu").token_ids
    assert engine.stats().drafts.drafted > NUM_TOKENS


@pytest.mark.parametrize("name", ["Qwen3Moe", "Qwen3Next"])
def test_drafts_are_the_networks_own_after_the_text_so_far(
    name: str,
    *,
    drafting: Drafting,
    checkpoint: MakeCheckpoint,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The features that it heard, pass by pass, are those of the whole text read at once."""
    drafts: list[tuple[list[int], Draft]] = []
    draft = block_drafter._Row.draft

    def noting(row: block_drafter._Row, history: Any, count: int) -> Draft:
        drafts.append((list(history), draft(row, history, count)))
        return drafts[-1][1]

    monkeypatch.setattr(block_drafter._Row, "draft", noting)
    drafting(name, k=7).generate(PROMPT[0].tolist(), max_tokens=NUM_TOKENS, ignore_eos=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint(name), dtype=torch.float32).eval()
    network = read_network(tmp_path / "drafter", dtype=torch.float32, device=torch.device("cpu"))
    states = HiddenStates(model, network.shape.target_layers)
    for history, made in drafts[:-1]:  # the last one is cut by max_tokens
        with torch.no_grad(), states.listening() as heard:
            model(torch.tensor([history[:-1]]))
        ids = torch.tensor([history[-1]] + [network.shape.mask_token] * 7)
        embedded = model.get_input_embeddings()(ids)[None, None]
        with torch.no_grad():
            context = network.read(heard.side_by_side())
            hidden = network(embedded, torch.tensor([[len(history) - 1]]), context)
            chances = torch.softmax(model.get_output_embeddings()(hidden[0, 0, 1:]), -1)
        assert made.token_ids == tuple(chances.argmax(-1).tolist())[: len(made.token_ids)]
        assert made.confidences == pytest.approx(chances.amax(-1).tolist()[: len(made.token_ids)], rel=1e-3)


def test_rows_penalties_and_seeds(drafting: Drafting, alone: Alone) -> None:
    engine, options = drafting("Qwen3Moe"), {**OPTIONS, "repetition_penalty": 1.6}
    for prompt in PROMPTS[:2]:
        assert engine.generate(prompt, **OPTIONS).token_ids == alone(prompt).token_ids
    assert engine.generate(PROMPTS[1], **options).token_ids == alone(PROMPTS[1], **options).token_ids
    texts = [
        engine.generate(PROMPTS[0], temperature=0.9, seed=seed, **OPTIONS).token_ids for seed in (1, 2, 1)
    ]
    assert texts[0] == texts[2] != texts[1]


def test_one_set_of_experts_a_draft(drafting: Drafting) -> None:
    routing = {"policy": "block_selection", "growth": 0.5, "rerouting": 0.3}
    engine = drafting("Qwen3Moe", routing=routing)
    engine.generate(PROMPTS[0], **OPTIONS)
    assert engine.stats().decode.routing.deviating > 0


def test_a_network_that_is_not_sure_drafts_nothing(
    drafting: Drafting, monkeypatch: pytest.MonkeyPatch, alone: Alone
) -> None:
    drafts, draft = list[Draft](), block_drafter._Row.draft

    def noting(row: block_drafter._Row, history: Any, count: int) -> Draft:
        drafts.append(draft(row, history, count))
        return drafts[-1]

    engine = drafting("Qwen3Moe")
    monkeypatch.setattr(block_drafter, "LEAST_CHANCE", 0.999)
    monkeypatch.setattr(block_drafter._Row, "draft", noting)
    assert engine.generate(PROMPTS[0], **OPTIONS).token_ids == alone(PROMPTS[0]).token_ids
    assert drafts
    assert all(made.token_ids == () for made in drafts)


# ---- what is refused, and what is planned


def plan(target: Path, **speculation: Any) -> Any:
    return plan_for(load_config({"model": {"path": str(target)}, "speculation": speculation, **SETTINGS}))


def test_a_drafter_that_is_not_there_is_told_where_it_would_lie(checkpoint: MakeCheckpoint) -> None:
    with pytest.raises(
        ConfigError, match=r"\.drafter does not exist; name the folder of a DFlash checkpoint"
    ):
        plan(checkpoint("Qwen3Moe"), drafter="block")


@pytest.mark.parametrize(
    "changed",
    [{"hidden": 24}, {"num_target_layers": 9}, {"mask_token": 10**6}, {"target_sha256": "0" * 64}],
    ids=lambda changed: next(iter(changed)),
)
def test_a_drafter_of_another_model_is_refused_before_experts_are_read(
    changed: dict[str, Any], checkpoint: MakeCheckpoint, tmp_path: Path, banks: Any
) -> None:
    target = checkpoint("Qwen3Moe")
    folder = build_drafter(target, tmp_path / "drafter", **changed)
    speculation = {"drafter": "block", "model": str(folder)}
    with pytest.raises(CheckpointError, match="was made for another model"):
        Engine.load(target, speculation=speculation, **SETTINGS)
    assert banks.num_made == 0


def test_the_drafter_of_this_model_is_taken(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    target = checkpoint("Qwen3Moe")
    folder = build_drafter(target, tmp_path / "drafter", target_sha256=config_sha256(target))
    with Engine.load(target, speculation={"drafter": "block", "model": str(folder)}, **SETTINGS) as engine:
        assert engine.generate(PROMPTS[0], max_tokens=4).token_ids


def test_the_plan_counts_weights_context_and_what_is_heard(
    checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    target = checkpoint("Qwen3Moe")
    folder = build_drafter(target, tmp_path / "drafter")
    hidden = json.loads((folder / "config.json").read_text())["hidden_size"]
    rows = {
        row["name"]: row for row in to_json(plan(target, drafter="block", model=str(folder)).memory)["rows"]
    }
    attention = 2 * hidden * 4 * 8 + 2 * hidden * 2 * 8 + 2 * 8
    weights = 2 * hidden * hidden + 2 * hidden + 2 * (attention + 3 * hidden * 24 + 2 * hidden)
    per_token = 2 * (2 * 2 * 8) + 2 * hidden  # keys and values of two layers, features of two layers
    assert rows["drafter"]["load_bytes"] == 4 * weights
    assert rows["drafter"]["decode_bytes"] == 4 * (weights + 2 * 256 * per_token)
