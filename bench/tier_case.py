"""One engine in a process of its own, in a control group if one is named: its text, speed and memory.

    python -m bench.tier_case MODEL --config '{"memory": {"backing": "direct"}}' --tokens 64

prints a JSON object, a `TierCase`, on the last line.

    start, a token │ long prompt │ a few tokens │ answer │ answer │ answer │ answer
    bytes counted  │ reads all   │ warm up      │ measured
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from bench.bundled_decode import PROMPTS
from bench.machine import ROOT
from bench.memory_limit import LimitedGroup, join
from bench.peak_memory import MemoryWatch, PeakMemory

if TYPE_CHECKING:
    from hetero_runtime.plan import MemoryPlan
    from hetero_runtime.stats import EngineStats

LONG_PROMPT = 256
"""Tokens whose experts are nearly all there are: they are loaded one after another as the disk gives them."""
WARM_UP_TOKENS = 4


class Planned(NamedTuple):
    """Bytes at the peak of the plan, and of all experts."""

    host: int
    device: int
    experts: int

    @classmethod
    def of(cls, plan: MemoryPlan) -> Self:
        """What `plan` says."""
        from hetero_runtime.plan.demand import PHASES

        host, device = (max(plan.used_bytes(tier, phase) for phase in PHASES) for tier in ("host", "device"))
        return cls(host, device, plan.geometry.bank_bytes)


class Start(NamedTuple):
    """Bytes until the first token of a short prompt."""

    read: int
    """What the kernel brought from disks for this process; nothing where it had it already."""
    needed: int
    """Of the experts used, and of all weights that are no experts."""


class TierCase(NamedTuple):
    """What one engine did. `text`: the tokens of all answers. Rates are of decode but `prompt_read_gb_s`."""

    text: list[int]
    tok_s: float
    hit_rate: float
    read_bytes: int
    """Into the slabs that computation reads."""
    prompt_read_gb_s: float
    """While reads were under way, in a long prompt; 0 where nothing is read."""
    slabs: int
    host_hit_rate: float = 0.0
    """Of what those slabs were given, what lay in host memory on the way; 0 where nothing lies between."""
    disk_bytes: int = 0
    disk_gb_s: float = 0.0
    """While reads were under way; 0 where nothing is read."""
    peak: PeakMemory = PeakMemory(0, 0, 0)
    planned: Planned = Planned(0, 0, 0)
    start: Start = Start(0, 0)

    @classmethod
    def run(
        cls,
        model: Path,
        config: Mapping[str, Any],
        *,
        tokens: int,
        group: LimitedGroup | None = None,
        routing: Path | None = None,
        limit_s: float | None = None,
    ) -> Self:
        """Run the case in a child, inside `group`. Raises CalledProcessError when it fails or is killed,
        TimeoutExpired after `limit_s`."""
        command = [sys.executable, "-m", "bench.tier_case", str(model), "--tokens", str(tokens)]
        command += ["--config", json.dumps(config)]
        if group is not None:
            command += ["--group", str(group.folder)]
        if routing is not None:
            command += ["--routing", str(routing)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=limit_s,
        )
        return cls.from_json(done.stdout.splitlines()[-1])

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What a child printed."""
        found = json.loads(text)
        for name, kind in (("peak", PeakMemory), ("planned", Planned), ("start", Start)):
            found[name] = kind(*found[name])
        return cls(**found)

    @classmethod
    def measure(
        cls, model: Path, config: Mapping[str, Any], *, tokens: int, routing: Path | None = None
    ) -> Self:
        """Load the engine here and let it answer. `routing`: what says which experts run; None: routers."""
        import torch

        from hetero_runtime.assembly import assemble
        from hetero_runtime.engine import Engine
        from hetero_runtime.planned import plan_for
        from hetero_runtime.source import config_from

        planned = plan_for(config_from({**config, "model": {"path": str(model)}}, {}))
        with MemoryWatch(torch.device(planned.config.torch_device)) as watch:
            read_before = _read_bytes()
            parts = assemble(planned.config)
            if routing is not None:
                _replay(parts, model, routing)
            with Engine(parts) as engine:
                engine.generate(PROMPTS[0], max_tokens=1)
                first, read = engine.stats(), _read_bytes() - read_before
                needed = _other_weights(planned.memory)
                needed += first.prefill.cache.required * parts.slabs.record_bytes
                engine.generate(list(range(100, 100 + LONG_PROMPT)), max_tokens=1)
                long = engine.stats()
                options: dict[str, Any] = {"temperature": 0.8, "ignore_eos": True}
                engine.generate(PROMPTS[0], seed=len(PROMPTS), max_tokens=WARM_UP_TOKENS, **options)
                warm = engine.stats()
                answers = [
                    engine.generate(prompt, seed=i, max_tokens=tokens, **options).token_ids
                    for i, prompt in enumerate(PROMPTS)
                ]
                engine.check()
                end, peak = engine.stats(), watch.peak()
        return cls(
            text=[token for answer in answers for token in answer],
            tok_s=len(answers) * (tokens - 1) / (end.decode.seconds - warm.decode.seconds),
            prompt_read_gb_s=_read_gb_s(first, long),
            slabs=sum(end.slots),
            peak=peak,
            planned=Planned.of(planned.memory),
            start=Start(read, needed),
            **_moved(warm, end),
        )


def _moved(begin: EngineStats, end: EngineStats) -> dict[str, Any]:
    """What decode, and the short prompts between, moved and found, by fields of TierCase."""
    cache = end.decode.cache - begin.decode.cache
    reads, spared = end.disk.reads - begin.disk.reads, end.disk.spared - begin.disk.spared
    return {
        "hit_rate": cache.hit_rate,
        "read_bytes": cache.bytes_moved,
        "host_hit_rate": spared / (spared + reads) if spared else 0.0,
        "disk_bytes": end.disk.num_bytes - begin.disk.num_bytes,
        "disk_gb_s": _read_gb_s(begin, end),
    }


def _read_gb_s(begin: EngineStats, end: EngineStats) -> float:
    """While reads were under way; 0 where nothing was read."""
    num_bytes, busy_s = end.disk.num_bytes - begin.disk.num_bytes, end.disk.busy_s - begin.disk.busy_s
    return num_bytes / busy_s / 1e9 if num_bytes else 0.0


def _other_weights(plan: MemoryPlan) -> int:
    """Bytes of the weights that are no routed experts."""
    from hetero_runtime.plan.geometry import ITEMSIZE

    itemsize = ITEMSIZE[plan.config.model.dtype]
    return plan.geometry.backbone.num_bytes(itemsize) + plan.geometry.shared.num_bytes(itemsize)


def _read_bytes() -> int:
    """What the kernel read from disks for this process so far."""
    import psutil

    return int(psutil.Process().io_counters().read_bytes)


def _replay(parts: Any, model: Path, routing: Path) -> None:
    """Let the recording at `routing` choose the experts of `parts`."""
    from bench.decode_case import model_sizes, replay_experts
    from bench.routing import RecordedRouting

    replay_experts(parts, routing=RecordedRouting.load(routing).laid_over(**model_sizes(model)))


def main(arguments: Sequence[str] | None = None) -> None:
    """The child."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--config", type=json.loads, required=True, help="JSON")
    parser.add_argument("--tokens", type=int, required=True, help="of each answer")
    parser.add_argument("--group", type=Path, help="control group to join first")
    parser.add_argument("--routing", type=Path, help="what bench.routing_replay recorded; default: its own")
    options = parser.parse_args(arguments)
    if options.group is not None:
        join(options.group)
    case = TierCase.measure(options.model, options.config, tokens=options.tokens, routing=options.routing)
    print(json.dumps(case._asdict()))


if __name__ == "__main__":
    main()
