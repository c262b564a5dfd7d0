"""The configuration tree. Every key of the YAML file is a field here, under the same name.

Defaults are what works in this version. A value that is listed but works only later is refused by
`hetero_runtime.config.available`, never ignored. The note inside an `Annotated` is what an error
message offers as the allowed values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

Auto = Literal["auto"]
Count = Annotated[int, Ge(0), "a whole number of 0 or more"]
Positive = Annotated[int, Ge(1), "a whole number of 1 or more"]
Share = Annotated[float, Ge(0), Le(1), "a number from 0 to 1"]
Fraction = Annotated[float, Gt(0), Le(1), "a number above 0, up to 1"]
ByteSize = Annotated[int, Ge(0), "bytes, such as 8GiB, 12.5 GB or 8589934592"]

Preset = Literal["auto", "lru", "seqmoe", "psr", "vismmoe"]
Device = Literal["cuda", "cpu", "unified"]
TorchDevice = Literal["cuda", "cpu"]
Mode = Literal["eager", "graph"]
ExpertsFormat = Literal["checkpoint", "bf16", "fp8", "int8", "int4"]
Dtype = Literal["float32", "bfloat16", "float16"]
Pool = Literal["global", "per_layer"]
Backing = Literal["ram", "mmap", "direct", "swap"]
Policy = Literal["exact", "cache_prior", "psr", "speculative_experts", "block_selection"]
Priority = Literal["lru", "a"]
Horizon = Literal["step", "token", "layer"]
Isa = Literal["auto", "avx2", "avx_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx", "neon"]
MissHandler = Literal["load", "cpu", "hybrid"]
CpuBackend = Literal["native", "torch", "ktransformers"]
Selection = Literal["affinity", "saliency", "random", "mix"]


@dataclass(frozen=True)
class ModelConfig:
    path: str | None = None
    """Folder of a Hugging Face safetensors checkpoint. null: the bundled model."""
    experts: ExpertsFormat = "checkpoint"
    """Format of the routed experts. checkpoint: byte for byte as on disk. bf16, fp8, int8, int4: written so
    while they are loaded, from experts that are floats on disk; what is no routed expert stays as it is."""
    dtype: Dtype | Auto = "auto"
    """Dtype of computation, of the non-expert weights and of the KV cache. auto: the checkpoint's."""


@dataclass(frozen=True)
class MemoryConfig:
    gpu: ByteSize | Auto = "auto"
    """Bytes that the device may hold. auto: what is free, less a reserve. On device cpu it caps the part
    of host memory that plays the device."""
    host: ByteSize | Auto = "auto"
    """Bytes that host memory may hold. auto: what is available (cgroup limits included), less a reserve."""
    slabs: Count | Literal["all", "auto"] = "auto"
    """Experts that the slab cache holds, all layers together. auto: the most that fit."""
    residency: Fraction | None = None
    """Slabs as a share of all routed experts. Instead of `slabs`, not beside it."""
    pool: Pool = "global"
    """global: any slab serves any layer. per_layer: each layer has its own, equally many."""
    pinned_prefix: Count | Literal["all", "auto"] = "auto"
    """First MoE layers whose experts all stay on the device, outside the slab cache. auto: 0, unless
    prediction.predictor is lookahead_mlp, or vision.keep_ratio below 1; then as many as forecasts need
    (VisMMOE's Eq. 10), or as a profile beside the model, FOLDER.prefix.json, has found fastest, taken out of
    what slabs or residency give."""
    backing: Backing = "ram"
    """Where routed experts live, below the slabs. ram: all of them in host memory. direct: in an expert file,
    read around the page cache; host memory holds as many as `host` allows. mmap: in an expert file, read
    through the page cache (a disk that fails under a mapping ends the process). swap: in host memory that the
    system may swap out. The last three in eager mode."""
    expert_file: str = "auto"
    """What `hetero-runtime pack` wrote, with the same `model.experts`. backing direct and mmap read experts
    from it while they serve; ram and swap load all of them from it. auto: the file beside the model's folder,
    FOLDER.experts.safetensors, for direct and mmap; the checkpoint for ram and swap."""
    host_slabs: Count | Auto = "auto"
    """Experts that host memory holds on their way from where they live to a device with memory of its own.
    Above a disk they are others than the slabs': what leaves the device goes back there. auto: as many as fit
    above a disk; a token's top-k where the system itself keeps what it can."""
    packed: bool | Auto = "auto"
    """Keep bf16 experts at twelve bits an element in the host bank, every bit of them preserved: a quarter
    less memory, a quarter fewer bytes to move. auto: where a CUDA device decodes them."""


@dataclass(frozen=True)
class RoutingConfig:
    policy: Policy = "exact"
    """How experts are selected. exact: as the model's router says. cache_prior: those in a logical cache gain
    a bonus. psr: the same, and the next layer's router, asked one layer early, inserts into that cache.
    speculative_experts: what was predicted one layer early. block_selection: while drafts are checked, one
    set of experts for all tokens of a draft. Weights are always the router's own."""
    kl_budget: Annotated[float, Ge(0), "a number of 0 or more"] = 0.0
    """Divergence from exact routing that preset auto may accept for speed, in nats a token, as it measures it
    on some dozens of tokens. 0: exact."""
    bonus: Annotated[float, Ge(0), "a number of 0 or more"] = 0.2
    """What an expert in the logical cache gains (lambda of cache_prior and psr), in ranges of the layer's
    router scores (max - min). 0: exact routing."""
    insertions: Count = 1
    """Experts that psr and speculative_experts may insert a layer and token (n)."""
    window: Positive = 2
    """Of how many of the best that the next layer's router names, for psr and speculative_experts."""
    protected: Count = 0
    """So many of the router's best gain the bonus of cache_prior wherever they are (J)."""
    range: Literal["fixed", "running"] = "fixed"
    """The range of scores that a bonus of cache_prior is measured in. fixed: the calibrated one. running: the
    mean over the request so far."""
    priority: Priority | Auto = "auto"
    """Who leaves the logical cache last. lru: used last. a: wanted by the router lately, or for this token on
    calibration text. auto: a, and lru for cache_prior."""
    capacity: Positive | Auto = "auto"
    """Experts a layer in the logical cache. auto: as many as a layer has slabs, so that outputs depend on
    memory. A number makes them the same on every machine."""
    calibration: str = "auto"
    """File that `hetero-runtime calibrate routing` wrote. auto: the one beside the model's
    folder, FOLDER.calibration.safetensors."""
    growth: Annotated[float, Ge(0), "a number of 0 or more"] = 1.05
    """Experts in a set of block_selection beyond the first token's own (gamma), in effective ones of what the
    drafted tokens want: e to the entropy of their weighted demand."""
    rerouting: Annotated[float, Ge(0), "a number of 0 or more"] = 0.05
    """Share of a draft's demand that block_selection may take away by leaving out experts that are not among
    those that ran last. 0: none is left out."""
    rescue: Annotated[float, Ge(0), "a number of 0 or more"] = 0.3
    """From this weight on, the root of its probability to be kept, a drafted token has its own best expert
    even where block_selection has left that out. Above 1: none has."""


@dataclass(frozen=True)
class PredictionConfig:
    predictor: Literal["none", "frequency", "mamba2", "pregate", "lookahead_mlp"] = "frequency"
    """What forecasts the experts that coming layers need. frequency: popularity so far. mamba2: trained on
    this model's routing, for schedules and evictions that act on forecasts. pregate: the next layer's router
    on this layer's input, in graph mode. lookahead_mlp: at every layer, of the next five in the same pass, by
    recent routing, hidden states and what images look like; in graph mode for schedule top_b."""
    path: str = "auto"
    """File of a trained predictor. auto: the one beside the model's folder, FOLDER.predictor.safetensors for
    mamba2, FOLDER.lookahead.safetensors for lookahead_mlp."""
    horizon: Horizon | Auto = "auto"
    """How near mamba2's forecasts are made anew. step: never, they are made a step ahead. token: as soon as
    the token is sampled. layer: besides, by the next layer's router on this layer's input. auto: as near as
    the predictor's file has learned where forecasts lead to transfers that overlap with computation; step
    where they do not, and in a captured step."""


@dataclass(frozen=True)
class PrefetchConfig:
    schedule: Literal["none", "popularity", "jsd", "moe_infinity", "promoe", "edf", "top_b", "bounded"] = (
        "popularity"
    )
    """Which transfer goes next. popularity: most wanted experts first, of layers to come, before a prompt and
    while it passes. jsd, moe_infinity, promoe, edf, top_b: by forecasts, during decode, where copies overlap
    with computation (on device cpu only reads of experts below host memory do); and by popularity during
    prefill, unless lookahead_mlp says what comes there too. bounded: what the routing policy inserts into its
    logical cache, during decode; and by popularity during prefill."""
    extra: Count = 0
    """Experts that may be fetched a layer beyond the router's top-k, by forecasts."""
    popularity: str = "auto"
    """What prompts are fetched ahead by: a file of `hetero-runtime calibrate routing`, whose text says how
    often each expert is used; what the engine counts while it runs adds to it. auto: the one beside the
    model's folder, FOLDER.calibration.safetensors, where there is one. none: only what it counts."""
    in_flight: Positive = 2
    """Copies that schedule bounded has on the link at most. Changes no output."""


@dataclass(frozen=True)
class EvictionConfig:
    policy: Literal["lru", "lfu", "lfru", "belady", "logical", "lookahead"] = "lru"
    """Which slab is given up first. belady: the one whose expert the forecasts want least. lookahead: the
    same, but experts of the next five layers are guarded: no prefetch takes their place, and a load does only
    once no other is left. logical: one whose expert the routing policy's logical cache does not hold."""


@dataclass(frozen=True)
class MissesConfig:
    handler: MissHandler = "load"
    """What happens to an expert that is needed and absent. load: copied to a slab, the layer waits. cpu:
    computed on the CPU where it lies, once no slab is empty. hybrid: a layer's misses are split so that link
    and CPU finish together, by costs measured at the start and while running. Output of cpu and hybrid equals
    transformers' up to rounding, and with hybrid the rounding depends on timing. With execution.mode: graph
    that is for decode steps, the misses of a prompt are loaded, and hybrid tries shares of the misses in
    turn, over some hundred steps, and keeps the one with which whole steps are fastest; a layer loads one of
    its misses every few tokens in any case. With cpu nothing is, so over a long text fewer experts hit. Steps
    compare where they have as many tokens as most have had of late: so many rows, or drafted tokens."""
    cpu_share: Share | Auto = "auto"
    """Share of each layer's misses that hybrid computes on the CPU, those of least worth. auto: by measured
    costs. A number asks no clock: the same requests, one after another, give the same bits in every run."""


@dataclass(frozen=True)
class ExecutionConfig:
    mode: Auto | Mode = "auto"
    """eager: driven by the host, equal to transformers in every bit. graph: decode as one CUDA graph, on the
    device alone, many times as fast, its sums in another order; where that turns out impossible it stays
    eager and says why. auto: graph on a CUDA device wherever model, memory and the other keys allow it, else
    eager; `hetero-runtime plan` says which, and why not graph."""
    compile: bool = False
    """Run torch.compile on the non-expert part."""
    max_rows: Positive = 4
    """Sequences decoded together. The KV cache is planned for all of them."""
    max_length: Positive = 4096
    """Tokens of one sequence, prompt and answer together."""


@dataclass(frozen=True)
class CpuConfig:
    threads: Positive | Auto = "auto"
    """Cores for the CPU's part: loading and packing, and, with misses.handler cpu or hybrid, one for the
    engine, with execution.mode: graph one that listens to the step, and the others for experts. auto: the
    physical cores this process may use."""
    isa: Isa = "auto"
    """Instruction set of the native kernels. auto: the fastest that executes here, of those that keep
    float32 unless the model computes in bfloat16 (then activations are rounded: for many tokens to bfloat16,
    for a few of int8 and int4 experts to 16 bits of their largest)."""
    backend: CpuBackend = "native"
    """Who computes experts on the CPU. native: our kernels, on the host bank as it lies. torch: torch's
    products, for every format. ktransformers: kt-kernel 0.7.2, where it was installed by hand
    (`pip install --no-deps kt-kernel==0.7.2 gguf`), for models in bfloat16 with bf16, fp8, int8 or int4
    experts: it keeps a second copy of their weights (int4: two more), and has threads that spin, for which
    a processor stays free; int8 and int4 experts get activations rounded to int8, 1 to 2 % of a sum."""


@dataclass(frozen=True)
class VisionConfig:
    keep_ratio: Fraction | Auto = 1.0
    """Share of each image's tokens that go on behind the pinned prefix (VisMMOE's beta), which must not be
    empty then. 1: all of them, no compression. Answers are those of a model that sees less. auto: 0.5 where
    tokens can be dropped at all, for a model that sees and has a pinned prefix; 1 elsewhere."""
    method: Selection = "affinity"
    """Who chooses the tokens. affinity: the salient ones, then those that need few experts besides theirs
    (VisMMOE's Algorithm 1). saliency: what the vision encoder attends to, alone. random: chance. mix: the
    salient ones, then chance."""
    salient_ratio: Fraction = 0.25
    """Share of each image's tokens kept for their saliency alone (VisMMOE's alpha; affinity, mix)."""
    affinity: Annotated[float, Ge(0), "a number of 0 or more"] = 2.0
    """Weight of expert affinity against saliency (VisMMOE's lambda; affinity)."""
    seed: Count = 0
    """Of chance (random, mix): the same seed keeps the same tokens of the same prompt."""


@dataclass(frozen=True)
class SpeculationConfig:
    drafter: Literal["none", "prompt_lookup", "autoregressive", "block"] = "none"
    """Who drafts tokens for the model to check, many in one pass. prompt_lookup: the text itself, where it
    repeats. autoregressive: a small model. block: where it does not repeat, a network that drafts many tokens
    at once, from the model's own hidden states, trained for this model. Every token is still the model's own
    choice. A pass over several tokens sums in another order, so greedy text can part from plain decoding
    where two tokens are equally likely to within rounding: not seen in float32, now and then in bfloat16.
    Sampled text keeps its distribution, and another draft makes another text of the same seed."""
    model: str | None = None
    """Folder of what drafts. autoregressive: any causal model of transformers with the same tokenizer. block:
    a DFlash checkpoint that was trained for this model; null: the one beside the model's folder, which the
    bundled model has. It is kept whole on the device."""
    k: Positive = 15
    """Most tokens of a draft. Tokens that turn out wrong cost the copies of their experts."""


@dataclass(frozen=True)
class Config:
    """What the user wrote over the preset over the defaults; may still say `auto`."""

    preset: Preset = "lru"
    """A named set of the fields below; a field written beside it wins. auto: `run`, `chat` and `Engine.load`
    measure for some seconds which one is fastest here, and say why; elsewhere it is lru."""
    model: ModelConfig = field(default_factory=ModelConfig)
    device: Auto | Device = "auto"
    """Where the model computes. unified: on a GPU that reads experts where they lie in host memory, each of
    them once, as on a board whose GPU and CPU share one memory (a GPU with memory of its own can play that,
    slowly). In eager mode. auto: unified on such a board, cuda on another GPU, else cpu."""
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    prediction: PredictionConfig = field(default_factory=PredictionConfig)
    prefetch: PrefetchConfig = field(default_factory=PrefetchConfig)
    eviction: EvictionConfig = field(default_factory=EvictionConfig)
    misses: MissesConfig = field(default_factory=MissesConfig)
    execution: ExecutionConfig = field(default_factory=ExecutionConfig)
    cpu: CpuConfig = field(default_factory=CpuConfig)
    vision: VisionConfig = field(default_factory=VisionConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)


@dataclass(frozen=True)
class ResolvedModel:
    path: Path
    """Folder of the checkpoint."""
    experts: ExpertsFormat
    dtype: Dtype


@dataclass(frozen=True)
class ResolvedMemory:
    gpu: int
    """Bytes that the device may hold; on device cpu, a part of `host`."""
    host: int
    """Bytes that host memory may hold."""
    slabs: int
    """Slabs, all layers together; 0 when every layer is pinned."""
    pool: Pool
    pinned_prefix: int
    """First MoE layers whose experts all stay on the device."""
    backing: Backing
    expert_file: str
    """Path of the expert file; auto where experts are read from the checkpoint."""
    host_slabs: int
    """Experts that host memory holds, where they live below it and the device has memory of its own."""
    packed: bool
    """Whether the bank is packed after loading; weights that do not fit the packed form stay plain."""


@dataclass(frozen=True)
class ResolvedExecution:
    mode: Mode
    compile: bool
    max_rows: int
    max_length: int
    """Tokens; at most the model's context."""


@dataclass(frozen=True)
class ResolvedCpu:
    threads: int
    isa: Isa
    """auto: the kernels choose by executing, not by what the CPU claims."""
    backend: CpuBackend

    @property
    def workers(self) -> int:
        """Threads that compute experts: one core is the engine's."""
        return max(1, self.threads - 1)


@dataclass(frozen=True)
class ResolvedVision:
    keep_ratio: Fraction
    method: Selection
    salient_ratio: Fraction
    affinity: float
    seed: int


@dataclass(frozen=True)
class ResolvedConfig:
    """The tree with every `auto` decided for one machine and one model. Final."""

    preset: Preset
    model: ResolvedModel
    device: Device
    memory: ResolvedMemory
    routing: RoutingConfig
    """Priority, capacity and calibration decided where the policy reads them."""
    prediction: PredictionConfig
    prefetch: PrefetchConfig
    eviction: EvictionConfig
    misses: MissesConfig
    execution: ResolvedExecution
    cpu: ResolvedCpu
    vision: ResolvedVision
    speculation: SpeculationConfig

    @property
    def torch_device(self) -> TorchDevice:
        """What torch calls the device."""
        return "cpu" if self.device == "cpu" else "cuda"

    @property
    def slabs_are_bank(self) -> bool:
        """See `slabs_are_bank`."""
        return slabs_are_bank(self.device, self.memory.backing)


def slabs_are_bank(device: Device, backing: Backing) -> bool:
    """Whether the device computes experts where they were loaded, all of them, and none is ever copied."""
    return device == "unified" and backing == "ram"
