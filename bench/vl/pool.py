"""Pictures and their rows of questions, drawn by all cores while the device already trains.

Memory is shared by fork: anonymous, so that no limit of /dev/shm applies, and touched only as it fills.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import time
from multiprocessing.process import BaseProcess
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from bench.vl.drawing import NUM_CELLS, draw_picture
from bench.vl.questions import KINDS
from bench.vl.scenes import SIZE, Split, draw_scene
from bench.vl.text import ROW_LENGTH, RowWriter, ask_many

CHUNK = 128
"""Pictures that one process draws in a row, and that become ready together."""
ROWS_PER_PICTURE = 2
MAX_QUESTIONS = 24
NO_KIND = 255
_POLL_S = 0.05


class Drawn(NamedTuple):
    """Pictures with their cells and their rows of questions, one index for all."""

    pixels: npt.NDArray[np.uint8]  # [pictures, 192, 192, 3]
    cells: npt.NDArray[np.uint8]  # [pictures, 144, 3]
    rows: npt.NDArray[np.int16]  # [pictures, ROWS_PER_PICTURE, 4, ROW_LENGTH]
    kinds: npt.NDArray[np.uint8]
    """`[pictures, ROWS_PER_PICTURE, MAX_QUESTIONS]`: index in KINDS of each, NO_KIND after the last."""


class PicturePool:
    """Draws `num_chunks` × CHUNK pictures of a split in processes of its own. Make it before CUDA starts."""

    def __init__(
        self, split: Split, num_chunks: int, *, tokenizer: Tokenizer, seed: int, num_processes: int
    ) -> None:
        self.split, self.num_chunks, self._seed = split, num_chunks, seed
        pictures = num_chunks * CHUNK
        self.drawn = Drawn(
            _shared((pictures, SIZE, SIZE, 3), np.dtype(np.uint8)),
            _shared((pictures, NUM_CELLS, 3), np.dtype(np.uint8)),
            _shared((pictures, ROWS_PER_PICTURE, 4, ROW_LENGTH), np.dtype(np.int16)),
            _shared((pictures, ROWS_PER_PICTURE, MAX_QUESTIONS), np.dtype(np.uint8)),
        )
        self._is_ready = _shared((num_chunks,), np.dtype(np.uint8))
        self._processes: list[BaseProcess] = []
        context = multiprocessing.get_context("fork")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive a fork
        for first in range(num_processes):
            chunks = range(first, num_chunks, num_processes)
            process = context.Process(target=self._draw, args=(chunks, tokenizer), daemon=True)
            process.start()
            self._processes.append(process)

    @property
    def num_ready(self) -> int:
        """Chunks drawn so far, counted from the first one to the first that is missing."""
        missing = np.flatnonzero(self._is_ready == 0)
        return int(missing[0]) if len(missing) else self.num_chunks

    def wait(self, num_chunks: int) -> None:
        """Wait until so many are ready. Raises RuntimeError when a process died before."""
        while self.num_ready < num_chunks:
            failed = [process.exitcode for process in self._processes if process.exitcode]
            if failed:
                raise RuntimeError(f"a process that draws pictures ended with exit status {failed[0]}")
            time.sleep(_POLL_S)

    def close(self) -> None:
        """End the processes, whether or not they are done."""
        for process in self._processes:
            process.terminate()
            process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _draw(self, chunks: range, tokenizer: Tokenizer) -> None:
        write = RowWriter(tokenizer).write
        for chunk in chunks:
            for index in range(chunk * CHUNK, (chunk + 1) * CHUNK):
                scene = draw_scene(self.split, seed=self._seed, index=index)
                picture = draw_picture(scene)
                self.drawn.pixels[index], self.drawn.cells[index] = picture.pixels, picture.cells
                for row in range(ROWS_PER_PICTURE):
                    questions = ask_many(scene, np.random.default_rng([self._seed, index, row]))
                    self.drawn.rows[index, row], kept = write(questions)
                    kinds = [KINDS.index(question.kind) for question in kept]
                    self.drawn.kinds[index, row] = kinds + [NO_KIND] * (MAX_QUESTIONS - len(kinds))
            self._is_ready[chunk] = 1


def _shared(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
    size = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(mmap.mmap(-1, size), dtype=dtype).reshape(shape)
