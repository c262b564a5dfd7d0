"""The parts of a speculation, from a resolved configuration."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from hetero_runtime.config import ResolvedConfig
from hetero_runtime.hf.architectures import Architecture
from hetero_runtime.hf.hidden_states import HiddenStates
from hetero_runtime.hf.loading import DTYPES
from hetero_runtime.hf.rewind import RewindableSequences
from hetero_runtime.hf.router_choice import let_choose
from hetero_runtime.no_room import no_room_for
from hetero_runtime.plan.drafter import drafter_folder
from hetero_runtime.routing.build import steerable_shape
from hetero_runtime.speculation.base import Drafter
from hetero_runtime.speculation.block.shape import check_target
from hetero_runtime.speculation.block_routing import BlockRouting, BlockSequences
from hetero_runtime.speculation.checked import CheckedSequences
from hetero_scheduler.routing import BlockPool, BlockSelection, Shape


class Speculation(NamedTuple):
    """`k`: the most tokens of a draft. `blocks`: who chooses experts for a whole draft; None: the routers do,
    for each token."""

    drafter: Drafter
    k: int
    blocks: BlockRouting | None = None


def make_speculation(
    config: ResolvedConfig, tokenizer: Any, model: Any, architecture: Architecture
) -> Speculation | None:
    """What `config.speculation` asks for, for `model`, which may still be without weights; None where nothing
    is drafted.

    Raises CheckpointError for a drafter that cannot be loaded or has other words, ConfigError for routers
    that cannot be told what to choose.
    """
    if config.speculation.drafter == "none":
        return None
    blocks = _make_blocks(config, model, architecture)
    return Speculation(_make_drafter(config, tokenizer, model), config.speculation.k, blocks)


def checked_sequences(model: Any, blocks: BlockRouting | None) -> CheckedSequences:
    """Where texts of `model` come from, whose routers obey `blocks` from now on. Raises CheckpointError for a
    model whose texts cannot go back."""
    sequences = RewindableSequences(model)
    if blocks is None:
        return CheckedSequences(sequences)
    let_choose(model, blocks.choose, looks_ahead=False)
    return BlockSequences(sequences, blocks)


def _make_drafter(config: ResolvedConfig, tokenizer: Any, model: Any) -> Drafter:
    asked = config.speculation
    if asked.drafter == "prompt_lookup":
        from hetero_runtime.speculation.prompt_lookup import PromptLookup

        return PromptLookup()
    if asked.drafter == "block":
        return _make_block_drafter(config, model)
    from hetero_runtime.hf.drafter import load_drafter
    from hetero_runtime.speculation.autoregressive import AutoregressiveDrafter

    assert asked.model is not None, "speculation.model is checked with the configuration"
    device = torch.device(config.torch_device)
    drafter = load_drafter(asked.model, tokenizer, dtype=config.model.dtype, device=device)
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    return AutoregressiveDrafter(drafter, vocab_size=vocab_size, device=device)


def _make_block_drafter(config: ResolvedConfig, model: Any) -> Drafter:
    from hetero_runtime.speculation.block.drafter import BlockDrafter, Target
    from hetero_runtime.speculation.block.file import read_network
    from hetero_runtime.speculation.repeats_first import RepeatsFirst

    folder = drafter_folder(config.speculation, config.model.path)
    assert folder is not None, "a block drafter has a folder"
    device, text = torch.device(config.torch_device), model.config.get_text_config(decoder=True)
    with no_room_for("the drafter", device, fix="take speculation.drafter: prompt_lookup"):
        network = read_network(folder, dtype=DTYPES[config.model.dtype], device=device)
    check_target(network.shape, folder, config.model.path, text=text)
    target = Target(
        HiddenStates(model, network.shape.target_layers),
        model.get_input_embeddings(),
        model.get_output_embeddings(),
        vocab_size=text.vocab_size,
    )
    return RepeatsFirst(BlockDrafter(network, target, device=device))


def _make_blocks(config: ResolvedConfig, model: Any, architecture: Architecture) -> BlockRouting | None:
    routing = config.routing
    if routing.policy != "block_selection":
        return None
    assert routing.capacity != "auto", "the capacity is decided when a configuration is resolved"
    policy = BlockSelection(routing.growth, routing.rerouting, routing.rescue)
    shape = steerable_shape(config, model, architecture)
    _compile(BlockPool(policy, shape, capacity=routing.capacity), shape)
    return BlockRouting(policy, shape, capacity=routing.capacity, k=config.speculation.k)


def _compile(pool: BlockPool, shape: Shape) -> None:
    """Now, not while somebody waits for a token."""
    scores, own = np.zeros((1, shape.num_experts), np.float32), np.arange(shape.top_k)[None]
    pool.select(0, scores, own, np.ones(1))
