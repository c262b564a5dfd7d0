"""The control region: the only memory that the captured graph and the prefetch worker share.

Mapped host memory, 64-bit words; each single word has a line of its own, so that nobody's polling slows
another's writing. Every word has one writer. A ring entry is written before its tail is released.

    word              written by   meaning
    ---------------------------------------------------------------------------------------------
      0  POSITION     device       layers begun, told while tasks are on their way; a task whose deadline it
                                   reached is stale
     16  PAUSE        device       1 while a layer gathers its misses: submit nothing
     32  ERROR        device       TableError
     48  TASK_TAIL    device       tasks emitted so far
     64  LANDING_TAIL worker       landings reported so far
     80  HEARTBEAT    worker       grows while the worker lives
     96  STOP         host         1: the worker, and who answers calls, shall end
    112  FAILURE      worker       error code of the copy engine that ended it, 0 if none
    128  CONSUMED     device       landings whose bytes it needs no more where the worker left them
    144  CALLS        device       layers that asked the CPU for experts so far
    160  ANSWERS      CPU experts  those of them that are answered
    176  tasks        device       ring of R entries: key, slot, tag, deadline
    176 + 4R landings worker       ring of R entries: slot, tag, status, buffer, positions

    device ─ task i at i mod R, TASK_TAIL ─▶ worker ─ copies ─ landing j at j mod R, LANDING_TAIL ─▶ device

Each task gets exactly one landing, and the device emits a task only while fewer than R are without one. So
neither ring can overrun, and the device never reads a word that the worker writes in order to send.

Copies go straight into slabs; packed records go into a few staging buffers on the device, which decodes them
from there once it has taken note of their landing. A buffer is used again only when CONSUMED has passed it.

`positions` of a landing that arrived: by how much POSITION grew while the link carried it. Copies follow each
other, so that begins with its own submission or with the end of the copy before it, whichever came later.
"""

from __future__ import annotations

from enum import IntEnum

import torch

from hetero_gpu.control.fault import TableError

WORD_BYTES = 8
TASK_WORDS, LANDING_WORDS = 4, 5
NUM_HEAD_WORDS = 176


class Word(IntEnum):
    """Index of each single word; the module docstring has their meaning."""

    POSITION = 0
    PAUSE = 16
    ERROR = 32
    TASK_TAIL = 48
    LANDING_TAIL = 64
    HEARTBEAT = 80
    STOP = 96
    FAILURE = 112
    CONSUMED = 128
    CALLS = 144
    ANSWERS = 160


class Landed(IntEnum):
    """Status of a landing."""

    DROPPED = 0
    """Stale or failed: nothing was copied."""
    ARRIVED = 1


class ControlRegion:
    """One region; `device` says who the other side is (`cpu`: Triton's interpreter)."""

    def __init__(self, device: torch.device, *, ring_size: int = 256) -> None:
        """All words 0. Raises ValueError unless `ring_size` is a power of two, RuntimeError when the memory
        cannot be mapped for the device."""
        if ring_size < 1 or ring_size & (ring_size - 1):
            raise ValueError(f"ring_size is {ring_size}; it must be a power of two")
        self.ring_size = ring_size
        num_words = NUM_HEAD_WORDS + (TASK_WORDS + LANDING_WORDS) * ring_size
        is_cuda = device.type == "cuda"
        self._words = torch.zeros(num_words, dtype=torch.int64, pin_memory=is_cuda)
        self._view = self._words.numpy()
        self.host_address = self._words.data_ptr()
        self.device_address = self.host_address
        if is_cuda:
            from hetero_gpu.mapped import device_address

            self.device_address = device_address(self.host_address)

    def address(self, word: Word) -> int:
        """Where the device finds `word`."""
        return self.device_address + WORD_BYTES * word

    @property
    def tasks_address(self) -> int:
        """Where the device finds the task ring."""
        return self.device_address + WORD_BYTES * NUM_HEAD_WORDS

    @property
    def landings_address(self) -> int:
        """Where the device finds the landing ring."""
        return self.tasks_address + WORD_BYTES * TASK_WORDS * self.ring_size

    def read(self, word: Word) -> int:
        """The word as the host sees it now."""
        return int(self._view[word])

    def write(self, word: Word, value: int) -> None:
        """Set a word that the host owns (or, before anything runs, any word)."""
        self._view[word] = value

    def forget(self, code: TableError) -> None:
        """Clear the error word where it says `code`, which is told in another way. No kernel runs."""
        if self.read(Word.ERROR) == code:
            self.write(Word.ERROR, TableError.NONE)

    def restart(self, num_tasks: int) -> None:
        """As new, after `num_tasks` tasks that are all accounted for. No worker, no kernel runs."""
        for word in (Word.PAUSE, Word.ERROR, Word.STOP, Word.FAILURE):
            self.write(word, 0)
        self.write(Word.TASK_TAIL, num_tasks)
        self.write(Word.LANDING_TAIL, num_tasks)
        self.write(Word.CONSUMED, num_tasks)

    def raise_if_failed(self) -> None:
        """Raise RuntimeError for what a kernel reported, once: the word is cleared. Waits for nothing."""
        code = TableError(self.read(Word.ERROR))
        if code is not TableError.NONE:
            self.write(Word.ERROR, 0)
            raise RuntimeError(code.explain())
