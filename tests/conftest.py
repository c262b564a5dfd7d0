"""Set up every test alike: one thread, fixed seeds, no network, and `gpu` tests skipped without a GPU.

torch is not imported here unless a test asks for it, so the tests of planning and policies stay quick.
"""

from __future__ import annotations

import ctypes
import functools
import os
import random
import sys
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest

# Read by torch, numba and transformers when they are first imported, so they are set before any test is.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several processes test at once
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"


def _has_cuda_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


if not _has_cuda_driver():
    # Triton decides this when it is first imported; without a driver its kernels can only be interpreted.
    os.environ.setdefault("TRITON_INTERPRET", "1")

SEED = 20240
MOST_PROCESSES = 4
"""More gain little: each compiles for itself, and some tests keep several threads busy."""
PROCESS_BYTES = 3 << 30
"""Two were seen to hold 5.1 GB together at most, one of them 3.5; tests start children besides."""
STACK_SLOTS = 40_000


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """How many processes `-n auto` is: one a usable core, as far as memory goes."""
    from hetero_runtime.plan.hardware import detect

    machine = detect("cpu")
    return max(1, min(machine.usable_cores, machine.ram_available_bytes // PROCESS_BYTES, MOST_PROCESSES))


def _call(test: Callable[..., object], /, **arguments: object) -> object:
    return test(**arguments)


# CPython keeps the frames of calls in chunks of 16 KiB, and unmaps a chunk when the call that began it
# returns. Where the calls of a loop happen to cross a border, every turn maps and unmaps: kernels in Triton's
# interpreter then take twice as long. A frame as large as this one brings a chunk of 512 KiB, and what it
# calls has the rest.
_call.__code__ = _call.__code__.replace(co_stacksize=STACK_SLOTS)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Run every test from `_call`."""
    test = pyfuncitem.obj
    pyfuncitem.obj = functools.partial(_call, test)
    try:
        return (yield)
    finally:
        pyfuncitem.obj = test


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked `gpu`, with the reason, where there is no CUDA device."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if torch.cuda.is_available():
        return
    reason = f"no CUDA device (torch {torch.__version__})"
    for item in gpu_items:
        item.add_marker(pytest.mark.skip(reason=reason))


@functools.cache
def _spare_the_interpreter() -> None:
    """Let Triton's interpreter replace the words of its language once a launch.

    It does so anew at each call of a device function, a millisecond every time, where the first call has left
    nothing to replace: a third of what interpreted kernels take.
    """
    from triton.runtime import interpreter

    replace, launch, done = interpreter._patch_lang, interpreter.GridExecutor.__call__, set[frozenset[int]]()

    @functools.cache
    def words_of(function: Any) -> frozenset[int]:
        words = {id(interpreter.tl), id(interpreter.tl.core)}
        return frozenset(id(value) for value in function.__globals__.values() if id(value) in words)

    def replace_once(function: Any) -> Any:
        words = words_of(function)
        if words in done:
            return interpreter._LangPatchScope()
        done.add(words)
        return replace(function)

    def launch_anew(self: Any, *arguments: Any, **named: Any) -> None:
        done.clear()
        launch(self, *arguments, **named)

    interpreter._patch_lang = replace_once
    interpreter.GridExecutor.__call__ = launch_anew


@pytest.fixture(autouse=True)
def _quick_interpreter() -> None:
    """Where Triton's interpreter is in use."""
    if "triton.runtime.interpreter" in sys.modules:
        _spare_the_interpreter()


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    """Start every test from the same random state, whichever tests ran before it."""
    random.seed(SEED)
    np.random.seed(SEED)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(SEED)
