"""Run the offloaded engine and the plain model on the same prompts and compare.

    offloaded, at each residency   greedy text, logits, outputs of the decoder layers    then freed
    plain transformers             the same                                              then freed

One after the other, so the peak is the larger of the two and not their sum. The engine decodes as it would
serve: where that is by captured steps, layers are fused with each other, and text and logits alone compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from statistics import median
from typing import Any, NamedTuple

import torch

from hetero_runtime.assembly import Parts, assemble
from hetero_runtime.config import ResolvedConfig
from hetero_runtime.config.combinations import require_no_drafter
from hetero_runtime.config.routing import require_exact
from hetero_runtime.config.tree import ExpertsFormat, Mode
from hetero_runtime.errors import BudgetError, ConfigError
from hetero_runtime.hf.forward import EagerSequences, Sequences
from hetero_runtime.hf.loading import DTYPES
from hetero_runtime.hf.reference import load_reference
from hetero_runtime.hf.tokens import load_tokenizer
from hetero_runtime.orchestrator import Phase
from hetero_runtime.planned import Planned
from hetero_runtime.verify.comparison import GreedyRun, Trace, Verification, first_difference, logit_errors
from hetero_runtime.verify.tolerance import tolerance_of

PROMPTS = (
    "Once upon a time",
    "The quick brown fox jumps over the lazy dog. def add(a, b): return a + b. In 1865 the river froze; "
    "what is 12 plus 30? The answer is 42. To be, or not to be, that is the question.",
)
"""A short one, and one with enough variety to touch more experts than a small cache holds."""

PassContext = Callable[[Phase], AbstractContextManager[None]]


class _Side(NamedTuple):
    """What one model said to all prompts."""

    runs: list[GreedyRun]
    traces: list[Trace]
    """Empty for captured steps."""


class _Offloaded(NamedTuple):
    """What the engine said, and how."""

    side: _Side
    hit_rate: float
    mode: Mode


class _Speaker(NamedTuple):
    """A model that texts are opened in. `pass_`: what surrounds its passes."""

    model: Any
    sequences: Sequences
    device: torch.device
    pass_: PassContext
    has_layers: bool = True
    """Its decoder layers are transformers' own."""


def verify(
    planned: Sequence[Planned], *, prompts: Sequence[str] = PROMPTS, max_tokens: int = 64
) -> list[Verification]:
    """Compare the model of `planned`, whose entries differ in memory alone, with plain transformers.

    Greedy, `max_tokens` a prompt. Raises, before anything is loaded, BudgetError when the plain model does
    not fit and ConfigError for another model (its routing, its weights); and what loading raises.
    """
    require_exact(planned[0].config.routing, "verify compares with the model")
    require_no_drafter(planned[0].config.speculation, "verify compares every bit of single steps")
    _require_own_weights(planned[0].config.model.experts)
    _check_reference_fits(planned[0])
    config = planned[0].config
    tokenizer = load_tokenizer(config.model.path)
    ids = [list(tokenizer(prompt)["input_ids"]) for prompt in prompts]
    offloaded = [_listen_to_engine(plan.config, ids, max_tokens) for plan in planned]
    theirs = _listen_to_reference(config, ids, max_tokens)
    return [_compare(plan, ours, theirs) for plan, ours in zip(planned, offloaded, strict=True)]


def _require_own_weights(experts: ExpertsFormat) -> None:
    if experts != "checkpoint":
        raise ConfigError(
            f"model.experts: {experts} changes the weights, and verify compares with the model as it is; "
            f"leave it out, or measure what it costs: `hetero-runtime eval kl --set model.experts={experts}`"
        )


def _check_reference_fits(planned: Planned) -> None:
    memory, config = planned.memory, planned.config
    geometry = memory.geometry
    itemsize = DTYPES[config.model.dtype].itemsize
    expert_elements = 3 * geometry.hidden_size * geometry.moe_intermediate_size
    needed = geometry.num_routed_experts * expert_elements * itemsize
    needed += sum(g.num_bytes(itemsize) for g in (geometry.backbone, geometry.shared, geometry.vision))
    allowed = memory.budgets.limit("device" if config.device == "cuda" else "host")
    if needed > allowed:
        raise BudgetError(
            f"verify compares with the model all resident, which takes {needed / 1e9:.1f} GB on "
            f"{config.device}; {allowed / 1e9:.1f} GB are allowed. Use device: cpu where host memory has the "
            "room, or verify a smaller model of the same architecture"
        )


def _listen_to_engine(config: ResolvedConfig, ids: list[list[int]], max_tokens: int) -> _Offloaded:
    parts = assemble(config)
    try:
        mode = parts.orchestrator.mode
        is_eager = mode == "eager"
        sequences = EagerSequences(parts.model) if is_eager else parts.sequences
        engine = _Speaker(parts.model, sequences, parts.device, _offloaded_pass(parts), has_layers=is_eager)
        side = _listen(engine, ids, max_tokens)
        parts.orchestrator.check()
        hit_rate = (parts.cache.stats() + parts.orchestrator.device_stats()).hit_rate
        return _Offloaded(side, hit_rate, mode)
    finally:
        parts.close()


def _listen_to_reference(config: ResolvedConfig, ids: list[list[int]], max_tokens: int) -> _Side:
    device = torch.device(config.torch_device)
    model = load_reference(config.model.path, dtype=config.model.dtype, device=device)
    return _listen(_Speaker(model, EagerSequences(model), device, lambda _: nullcontext()), ids, max_tokens)


def _offloaded_pass(parts: Parts) -> PassContext:
    return lambda phase: parts.orchestrator.pass_(phase, checkpoint=lambda: None)


def _listen(speaker: _Speaker, prompts: list[list[int]], max_tokens: int) -> _Side:
    side = _Side([], [])
    for ids in prompts:
        side.runs.append(_greedy(speaker, ids, max_tokens))
        if not speaker.has_layers:
            continue
        trace: Trace = {}
        with (
            speaker.sequences.open() as sequence,
            _recording(speaker.model, trace),
            speaker.pass_(Phase.PREFILL),
        ):
            sequence.extend(torch.tensor(ids, device=speaker.device))
        side.traces.append(trace)
    return side


def _greedy(speaker: _Speaker, ids: list[int], max_tokens: int) -> GreedyRun:
    device = speaker.device
    with speaker.sequences.open() as sequence:
        with speaker.pass_(Phase.PREFILL):
            logits = [sequence.extend(torch.tensor(ids, device=device)).cpu()]
        tokens = [int(logits[0].argmax())]
        while len(tokens) < max_tokens:
            with speaker.pass_(Phase.DECODE):
                logits.append(sequence.extend(torch.tensor(tokens[-1:], device=device)).cpu())
            tokens.append(int(logits[-1].argmax()))
    return GreedyRun(tuple(tokens), tuple(logits))


@contextmanager
def _recording(model: Any, trace: Trace) -> Iterator[None]:
    """Inside, `trace` fills with the outputs of the decoder layers."""

    def keep(name: str) -> Callable[..., None]:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            trace[name] = tensor.detach().cpu().reshape(-1, tensor.shape[-1])

        return hook

    layers = [(n, m) for n, m in model.named_modules() if type(m).__name__.endswith("DecoderLayer")]
    handles = [module.register_forward_hook(keep(name)) for name, module in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _compare(planned: Planned, offloaded: _Offloaded, theirs: _Side) -> Verification:
    config, (ours, hit_rate, mode) = planned.config, offloaded
    runs = list(zip(ours.runs, theirs.runs, strict=True))
    errors = [error for a, b in runs for error in logit_errors(a, b)]
    return Verification(
        slabs=config.memory.slabs,
        residency=planned.memory.residency,
        num_tokens=sum(len(run.tokens) for run in ours.runs),
        tokens_equal=all(a.tokens == b.tokens for a, b in runs),
        max_logit_error=max(errors),
        typical_logit_error=median(errors),
        max_logit=max(float(logits.abs().max()) for run in theirs.runs for logits in run.logits),
        hit_rate=hit_rate,
        first_difference=first_difference(ours.traces, theirs.traces) if ours.traces else None,
        tolerance=tolerance_of(config.misses.handler, config.model.dtype, mode=mode),
        mode=mode,
    )
