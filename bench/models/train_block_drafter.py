"""Train the bundled model's block drafter.

    python -m bench.models.train_block_drafter --cache DIR --out DIR --seconds 85

The model speaks greedily for a part of the time, after prompts from training documents; then its drafter
learns to foresee what was said. Both follow the wall clock, so a run of any length ends properly. `--out`
gets config.json, model.safetensors and train.json, with what is accepted on held-out text. Defaults are for a
GPU; on two cores: `--rows 384 --batch 8 --blocks 16 --seconds 3600`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3MoeForCausalLM

from bench.machine import command_line, git_commit, machine_facts
from bench.models.block_lesson import Blocks, Target, block_loss, cut_blocks, draft, num_accepted
from bench.models.fast_forward import install_fast_forward
from bench.models.greedy_texts import continue_greedily, draw_prompts, repeat_spans
from bench.models.mixture import Sampler
from bench.models.streams import Stream, load_streams
from bench.models.train_tiny_moe import learning_rate
from hetero_runtime.bundled import model_path
from hetero_runtime.hf.hidden_states import HiddenStates
from hetero_runtime.prediction.fingerprint import config_sha256
from hetero_runtime.speculation.block.file import write_network
from hetero_runtime.speculation.block.network import BlockNetwork
from hetero_runtime.speculation.block.shape import BlockShape

TARGET_LAYERS = (1, 3, 5, 6)
_PAD = 1
_LOG_STEPS = 50
_HELD_OUT_ROWS = 64


@dataclass(frozen=True)
class Run:
    """One training run."""

    seconds: float = 85.0
    """For everything but reading the corpus and the last measurement."""
    saying: float = 0.3
    """Share of them in which the model makes texts."""
    rows: int = 4096
    """Texts made at once."""
    length: int = 288
    """Tokens of a text, its prompt included."""
    prompts: tuple[int, ...] = (16, 64, 32, 96)
    """Tokens of a prompt; each round of texts takes the next of them."""
    batch: int = 64
    blocks: int = 32
    """Blocks of each text in a step."""
    rate: float = 1.5e-3
    seed: int = 0


@dataclass(frozen=True)
class Texts:
    """`tokens` `[texts, length]`, how many of them each prompt took `[texts]`, and the target's features
    `[texts, length, layers · hidden]`."""

    tokens: Tensor
    prompts: Tensor
    features: Tensor

    def draw(self, count: int, blocks: int, size: int) -> tuple[Tensor, Blocks]:
        """Features of `count` texts, and `blocks` blocks of `size` tokens of each: they begin with the last
        token of its prompt or later."""
        device = self.tokens.device
        chosen = torch.randint(len(self.tokens), (count,), device=device)
        least = self.prompts[chosen, None] - 1
        room = self.tokens.shape[1] - 1 - least
        first = least + (torch.rand(count, blocks, device=device) * room).long()
        return self.features[chosen], cut_blocks(self.tokens[chosen], first, size)


def bundled_shape(config: Any) -> BlockShape:
    """A drafter of 1.8 M parameters for the bundled model, whose configuration is `config`."""
    return BlockShape(
        hidden=config.hidden_size,
        intermediate=256,
        heads=8,
        kv_heads=4,
        head_dim=32,
        windows=(None,) * 4,
        is_causal=(False,) * 4,
        block=16,
        target_layers=TARGET_LAYERS,
        num_target_layers=config.num_hidden_layers,
        mask_token=_PAD,
        rope_theta=10000.0,
        norm_eps=1e-6,
        context=config.max_position_embeddings,
        target_sha256=config_sha256(model_path()),
    )


def make_texts(target: Target, sampler: Sampler, run: Run, until_s: float) -> Texts:
    """Greedy texts until the clock says `until_s`, one round at least."""
    tokens, prompts, features = [], [], []
    while not tokens or time.monotonic() < until_s:
        length = run.prompts[len(tokens) % len(run.prompts)]
        said = continue_greedily(target.model, draw_prompts(sampler, run.rows, length), run.length)
        tokens.append(said)
        prompts.append(torch.full((run.rows,), length, device=said.device))
        features.append(target.features(said))
    return Texts(torch.cat(tokens), torch.cat(prompts), torch.cat(features))


def train(
    network: BlockNetwork, target: Target, texts: Texts, run: Run, *, seconds: float
) -> Iterator[tuple[int, float]]:
    """Train in place for `seconds`; yields the step and the loss now and then."""
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=run.rate, betas=(0.9, 0.95), weight_decay=0.01, fused=True
    )
    began_s, step = time.monotonic(), 0
    while (done := (time.monotonic() - began_s) / seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(done, run.rate)
        features, blocks = texts.draw(run.batch, run.blocks, network.shape.block)
        loss = _step(network, target, features, blocks, optimizer=optimizer)
        step += 1
        if step % _LOG_STEPS == 0:
            yield step, float(loss)
    yield step, float(loss)


def _step(
    network: BlockNetwork,
    target: Target,
    features: Tensor,
    blocks: Blocks,
    *,
    optimizer: torch.optim.Optimizer,
) -> Tensor:
    with torch.autocast(features.device.type, torch.bfloat16):
        loss = block_loss(draft(network, target, features, blocks), blocks)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


@torch.no_grad()
def measure(network: BlockNetwork, target: Target, sampler: Sampler, run: Run) -> dict[str, float]:
    """Tokens of a draft that are accepted, on texts after held-out prompts, by kind of prompt."""
    prompt, size = run.prompts[0], network.shape.block
    windows = sampler.draw(_HELD_OUT_ROWS)[:, :prompt]
    places = torch.arange(prompt, run.length - size, size // 2, device=windows.device)
    accepted = {}
    for kind, num_repeated in (("documents", 0), ("repeated", len(windows))):
        said = continue_greedily(target.model, repeat_spans(windows, num_repeated), run.length)
        counts = []
        for texts in said.split(16):
            blocks = cut_blocks(texts, places.expand(len(texts), -1), size)
            with torch.autocast(texts.device.type, torch.bfloat16):
                logits = draft(network, target, target.features(texts), blocks)
            counts.append(num_accepted(logits, blocks))
        accepted[kind] = float(torch.cat(counts).float().mean())
    return accepted


def load_target(device: torch.device) -> Target:
    """The bundled model on `device`: in bfloat16 on a GPU, in float32 on a CPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = Qwen3MoeForCausalLM.from_pretrained(model_path(), dtype=dtype).to(device).eval()
    model.requires_grad_(False)
    if device.type == "cuda":
        install_fast_forward(model)
    return Target(model, HiddenStates(model, TARGET_LAYERS))


def teach(streams: list[Stream], run: Run, out: Path) -> None:
    """All of a run: texts, training, what is accepted, the folder."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    training, held_out = (
        Sampler(
            [stream for stream in streams if stream.is_held_out == is_held],
            length=max(run.prompts),
            device=device,
            seed=run.seed,
        )
        for is_held in (False, True)
    )
    began_s = time.monotonic()
    target = load_target(device)
    texts = make_texts(target, training, run, began_s + run.saying * run.seconds)
    print(f"{time.monotonic() - began_s:6.1f} s  {texts.tokens.numel() / 1e6:.2f} M tokens said", flush=True)
    network = BlockNetwork(bundled_shape(target.model.config)).to(device)
    left_s = began_s + run.seconds - time.monotonic()
    for step, loss in train(network, target, texts, run, seconds=max(1.0, left_s)):
        print(f"{time.monotonic() - began_s:6.1f} s  step {step:5d}  loss {loss:.3f}", flush=True)
    write_network(network, out, vocab_size=target.model.config.vocab_size)
    facts = {
        "run": asdict(run),
        "tokens_said": texts.tokens.numel(),
        "steps": step,
        "loss": loss,
        "accepted": measure(network, target, held_out, run),
        "machine": machine_facts(),
        "commit": git_commit(),
        "command": command_line(),
    }
    (out / "train.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(facts["accepted"]))


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, help="folder of P.KIND.SOURCE.txt.xz, where --cache is empty")
    parser.add_argument("--cache", type=Path, required=True, help="folder of tokenised sources")
    parser.add_argument("--out", type=Path, required=True, help="where the drafter goes")
    for name in ("seconds", "saying", "rate"):
        parser.add_argument(f"--{name}", type=float, default=getattr(Run, name))
    for name in ("rows", "length", "batch", "blocks", "seed"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Run, name))
    options = vars(parser.parse_args(arguments))
    corpus, cache, out = options.pop("corpus"), options.pop("cache"), options.pop("out")
    torch.manual_seed(options["seed"])
    vocab_size = json.loads((model_path() / "config.json").read_text())["vocab_size"]
    _, streams = load_streams(corpus or cache, cache, vocab_size)
    teach(streams, Run(**options), out)


if __name__ == "__main__":
    main()
