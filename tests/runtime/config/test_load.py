"""What a user writes becomes a Config, or one message that says what to change."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero_runtime.config import Config, load_config
from hetero_runtime.config.available import AVAILABLE
from hetero_runtime.config.forecasts import FORECAST_SCHEDULES
from hetero_runtime.config.routing import READS
from hetero_runtime.config.schema import fields
from hetero_runtime.errors import ConfigError
from hetero_scheduler.prefetch import SCHEDULES
from hetero_scheduler.routing import ROUTING_POLICIES

CONFIGS = Path(__file__).parents[3] / "configs"


def _message(source: object, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides=overrides)  # type: ignore[arg-type]
    return str(caught.value)


def test_no_source_gives_the_defaults_and_they_work() -> None:
    config = load_config()
    assert config.preset == "lru"
    assert config.memory.slabs == "auto"
    assert config.execution.mode == "auto"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_loads(path: Path) -> None:
    assert isinstance(load_config(path), Config)


@pytest.mark.parametrize("preset", ["lru", "seqmoe", "psr"])
def test_a_presets_example_says_what_the_preset_says(preset: str) -> None:
    assert load_config(CONFIGS / f"{preset}.yaml") == load_config({"preset": preset})


def test_file_beats_preset_and_override_beats_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("preset: lru\neviction: {policy: lfu}\nexecution:\n  max_rows: 2\nmemory:\n")
    config = load_config(file, overrides=["eviction.policy=lfru", "memory.slabs=64"])
    assert (config.eviction.policy, config.execution.max_rows, config.memory.slabs) == ("lfru", 2, 64)
    assert load_config(file).eviction.policy == "lfu"


@pytest.mark.parametrize(
    ("written", "num_bytes"),
    [
        ("8GiB", 8 * 2**30),
        ("12.5 GB", 12_500_000_000),
        ("512 mib", 512 * 2**20),
        ("4G", 4 * 2**30),
        ("4096", 4096),
        (4096, 4096),
        ("auto", "auto"),
    ],
)
def test_sizes(written: object, num_bytes: object) -> None:
    assert load_config({"memory": {"gpu": written}}).memory.gpu == num_bytes


def test_empty_file_is_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert load_config(tmp_path / "empty.yaml") == load_config()


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ({"memory": {"slab": 4}}, ["memory.slab: unknown key", "did you mean memory.slabs?"]),
        ({"memmory": {"slabs": 4}}, ["memmory: unknown key", "did you mean memory?"]),
        ({"slabs": 4}, ["slabs: unknown key", "did you mean memory.slabs?"]),
        ({"execution": {"policy": "lru"}}, ["execution.policy: unknown key", "did you mean"]),
        ({"qqq": 1}, ["qqq: unknown key", "known here: preset, model, device"]),
        ({"memory": 4}, ["memory: 4 is not a mapping", "slabs"]),
        ({"memory": {"slabs": "many"}}, ["memory.slabs: 'many'", "a whole number of 0 or more, all, auto"]),
        ({"memory": {"slabs": -1}}, ["memory.slabs: -1", "0 or more"]),
        ({"memory": {"slabs": 1.5}}, ["memory.slabs: 1.5", "a whole number"]),
        ({"memory": {"slabs": True}}, ["memory.slabs: true is not allowed"]),
        ({"memory": {"residency": 1.5}}, ["memory.residency: 1.5", "above 0, up to 1, null"]),
        ({"memory": {"gpu": "8 parsecs"}}, ["memory.gpu: '8 parsecs'", "8GiB"]),
        ({"execution": {"max_rows": 0}}, ["execution.max_rows: 0", "1 or more"]),
        ({"execution": {"compile": "yes"}}, ["execution.compile: 'yes'", "true, false"]),
        ({"eviction": {"policy": "fifo"}}, ["eviction.policy: 'fifo'", "lru, lfu, lfru"]),
        ({"device": None}, ["device: null is not allowed", "auto, cuda, cpu"]),
        ({"preset": "fast"}, ["preset: 'fast'", "auto, lru"]),
        ({"memory": {"slabs": 8, "residency": 0.5}}, ["memory.slabs=8", "memory.residency=0.5", "keep one"]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_wrong_tree_is_one_message(source: dict[str, object], parts: list[str]) -> None:
    message = _message(source)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("path", "value", "works"),
    [
        ("execution.compile", "true", "false"),
    ],
)
def test_what_comes_later_is_refused_not_ignored(path: str, value: str, works: str) -> None:
    message = _message(None, f"{path}={value}")
    assert f"{path}: {value} is not in this version; what works now: {works}" in message


def test_every_refused_field_is_in_the_tree() -> None:
    assert set(AVAILABLE) <= set(fields())


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("memory.slabs", "write it as section.key=value"),
        ("=4", "write it as section.key=value"),
        ("memory.slab=4", "--set memory.slab=4: memory.slab: unknown key; did you mean memory.slabs?"),
        ("memory.slabs.x=4", "memory.slabs: {'x': 4} is not allowed"),
        ("memory=4", "memory: 4 is not a mapping"),
        ("memory.slabs=[4", "the value is not YAML"),
    ],
)
def test_a_wrong_override_is_one_message(override: str, part: str) -> None:
    assert part in _message(None, override)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert "No such file" in _message(tmp_path / "absent.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    assert "holds list" in _message(tmp_path / "list.yaml")
    (tmp_path / "bad.yaml").write_text("memory: {slabs: 4\n")
    assert "is not YAML" in _message(tmp_path / "bad.yaml")
    (tmp_path / "twice.yaml").write_text("memory:\n  slabs: 4\ndevice: cpu\nmemory: {pool: global}\n")
    assert "is not YAML (memory is given twice, line 4, column 1)" in _message(tmp_path / "twice.yaml")
    (tmp_path / "typo.yaml").write_text("memory: {slabz: 4}\n")
    assert _message(tmp_path / "typo.yaml").startswith(str(tmp_path / "typo.yaml"))


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            ["prefetch.schedule=jsd", "prediction.predictor=none"],
            ["prefetch.schedule: jsd", "prediction.predictor: none", "write prediction.predictor: mamba2"],
        ),
        (
            ["eviction.policy=belady", "prediction.predictor=none"],
            ["eviction.policy: belady acts on forecasts", "write prediction.predictor: mamba2 or frequency"],
        ),
        (
            ["prediction.predictor=mamba2"],
            ["prefetch.schedule: popularity", "eviction.policy: lru", "write prefetch.schedule: jsd"],
        ),
        (
            ["prediction.horizon=token"],
            ["prediction.horizon: token is for prediction.predictor: mamba2", "frequency", "leave it out"],
        ),
        (
            ["prediction.path=mine.safetensors"],
            ["prediction.path: mine.safetensors", "prediction.predictor: frequency", "leave prediction.path"],
        ),
        (["prefetch.extra=3"], ["prefetch.extra: 3", "is popularity", "or prefetch.extra: 0"]),
        (
            ["preset=seqmoe", "execution.mode=graph", "routing.policy=cache_prior"],
            ["cache_prior with forecasts and execution.mode: graph", "routing.policy: exact"],
        ),
        (
            ["execution.mode=graph", "execution.max_rows=9"],
            ["max_rows: 9 with execution.mode: graph is too many", "has 8 rows at most; write execution"],
        ),
        (
            ["prediction.predictor=pregate", "execution.mode=eager", "prefetch.schedule=top_b"],
            ["here execution.mode: eager, prefetch.schedule: top_b"],
        ),
        (
            ["preset=seqmoe", "execution.mode=graph", "eviction.policy=lru"],
            ["graph prefetch.schedule: jsd needs all of", "they are mamba2, jsd, lru.", "mode: eager"],
        ),
        (
            ["prediction.predictor=pregate"],
            [
                "pregate looks one layer ahead",
                "mode: graph, prefetch.schedule: top_b and eviction.policy: lru",
            ],
        ),
        (
            ["prediction.predictor=pregate", "execution.mode=graph", "prefetch.schedule=jsd"],
            ["here execution.mode: graph, prefetch.schedule: jsd"],
        ),
        (
            ["memory.backing=direct", "execution.mode=graph"],
            ["memory.backing: direct with execution.mode: graph is not in this", "memory.backing: ram"],
        ),
        (
            ["memory.backing=mmap", "memory.packed=true"],
            ["memory.packed: true is for experts that all lie in host memory", "write memory.packed: auto"],
        ),
        (
            ["eviction.policy=belady", "execution.mode=graph"],
            ["graph eviction.policy: belady needs all of", "frequency, popularity, belady", "preset: seqmoe"],
        ),
        (
            ["preset=psr", "execution.mode=graph", "prefetch.in_flight=4"],
            [
                "prefetch.in_flight: 4 with execution.mode: graph is not in this version",
                "one copy after another",
            ],
        ),
        (["preset=psr", "speculation.drafter=prompt_lookup"], ["prompt_lookup is not in this version"]),
        (["preset=psr", "memory.pinned_prefix=1"], ["memory.pinned_prefix: 1 is not in this version"]),
        (["preset=psr", "eviction.policy=belady", "prediction.predictor=frequency"], ["take preset: psr"]),
        (["preset=psr", "routing.protected=2"], ["routing.protected: 2 is for routing.policy: cache_prior"]),
        (["routing.bonus=0.3"], ["routing.bonus: 0.3 is for routing.policy: cache_prior, psr"]),
        (["routing.calibration=c"], ["routing.calibration: c is for", "and it is exact; leave it out"]),
        (
            ["preset=psr", "routing.policy=cache_prior"],
            [
                "prefetch.schedule: bounded fetches what a routing policy inserts",
                "cache_prior inserts nothing",
            ],
        ),
        (["prefetch.in_flight=4"], ["prefetch.in_flight: 4 is for prefetch.schedule: bounded"]),
        (["eviction.policy=logical"], ["routing.policy: exact has none", "eviction.policy: lru"]),
        (
            ["misses.handler=cpu", "misses.cpu_share=0.5"],
            ["misses.cpu_share: 0.5 is how misses.handler: hybrid splits, and here it is cpu"],
        ),
        (
            ["misses.handler=cpu", "memory.backing=direct"],
            ["misses.handler: cpu computes experts where they lie", "write memory.backing: ram"],
        ),
        (["preset=psr", "misses.handler=hybrid"], ["policy: psr gives text that no timing changes"]),
        (["cpu.isa=avx2"], ["cpu.isa: avx2", "misses.handler: load computes none", "cpu or hybrid"]),
        (["cpu.backend=torch"], ["cpu.backend: torch is for experts that the CPU computes"]),
        (
            ["misses.handler=cpu", "cpu.backend=torch", "cpu.isa=avx2"],
            ["cpu.isa: avx2 is for cpu.backend: native, and here it is torch"],
        ),
        (
            ["misses.handler=cpu", "memory.slabs=0", "preset=seqmoe"],
            ["prefetch.schedule: jsd acts on forecasts of what slabs should hold", "preset: lru"],
        ),
        (["vision.seed=1"], ["vision.seed: 1 says which visual tokens are kept", "keep_ratio: 1 keeps all"]),
        (
            ["vision.method=random", "vision.keep_ratio=1.0"],
            ["vision.method: random says which visual tokens are kept", "or leave it out"],
        ),
        (
            ["vision.keep_ratio=0.5", "vision.method=saliency", "vision.affinity=1.0"],
            ["vision.affinity: 1.0 is for vision.method: affinity, and it is saliency"],
        ),
        (
            ["vision.keep_ratio=0.5", "vision.method=random", "vision.salient_ratio=0.1"],
            ["vision.salient_ratio: 0.1 is for vision.method: affinity, mix, and it is random"],
        ),
        (
            ["vision.keep_ratio=0.2"],
            ["vision.salient_ratio: 0.25 is more than vision.keep_ratio: 0.2", "write 0.1 or less"],
        ),
        (
            ["vision.keep_ratio=0.5", "memory.pinned_prefix=0"],
            ["acts behind the pinned prefix", "write memory.pinned_prefix: 1 or more"],
        ),
        (
            ["vision.keep_ratio=0.5", "speculation.drafter=prompt_lookup"],
            ["keep_ratio: 0.5 with speculation.drafter: prompt_lookup is not in this version"],
        ),
        (
            ["vision.keep_ratio=0.5", "preset=psr"],
            ["vision.keep_ratio: 0.5 with routing.policy: psr is not in this version", "policy: exact"],
        ),
        (
            ["vision.keep_ratio=0.5", "preset=seqmoe"],
            ["forecasts of prediction.predictor: mamba2", "write preset: lru, or vision.keep_ratio: 1"],
        ),
    ],
    ids=lambda value: " ".join(value) if "=" in value[0] else "",
)
def test_what_makes_no_sense_together_is_refused(overrides: list[str], parts: list[str]) -> None:
    message = _message(None, *overrides)
    assert all(part in message for part in parts), message


def test_seqmoe_is_a_preset_whose_fields_can_be_replaced() -> None:
    config = load_config({"preset": "seqmoe"})
    assert (config.prediction.predictor, config.prefetch.schedule, config.prefetch.extra) == (
        "mamba2",
        "jsd",
        3,
    )
    assert (config.eviction.policy, config.execution.mode) == ("belady", "auto")
    graph = load_config({"preset": "seqmoe"}, overrides=["execution.mode=graph"])
    assert (graph.eviction.policy, graph.execution.mode) == ("belady", "graph")
    assert load_config({"preset": "seqmoe"}, overrides=["prefetch.schedule=none"]).eviction.policy == "belady"
    assert load_config({"preset": "seqmoe"}, overrides=["prediction.predictor=frequency"])


def test_every_schedule_of_forecasts_can_be_chosen() -> None:
    assert FORECAST_SCHEDULES == SCHEDULES
    for schedule in SCHEDULES:
        assert load_config(overrides=[f"prefetch.schedule={schedule}"]).prefetch.schedule == schedule


def test_every_routing_policy_can_be_chosen_with_its_keys() -> None:
    for policy in ROUTING_POLICIES:
        tree = {
            "policy": policy,
            **dict.fromkeys(set(READS[policy]) & {"insertions", "window", "protected"}, 3),
        }
        assert load_config({"routing": tree}).routing.policy == policy
    assert set(READS) == {*ROUTING_POLICIES, "block_selection"}
