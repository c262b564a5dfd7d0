"""Tokenised sources: one array of tokens a source and split, kept in a cache folder.

tokens   uint16  d0 d0 d0 <eot> d1 d1 <eot> d2 ...
starts   int64   0 .................. 4 ........ (where each document begins)
"""

from __future__ import annotations

import lzma
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from bench.models import chat
from bench.models.corpus import SEPARATOR, Source, is_held_out, read_sources
from bench.models.tokenizer import tokenizer_sample, train_tokenizer

TOKENIZER = "tokenizer.json"
"""File of a cache folder that marks it as full."""
_BATCH = 2000


@dataclass(frozen=True)
class Stream:
    """The tokens of one source in one split."""

    label: str
    """`kind.source`; conversations drawn from it are `chat.source`."""
    is_held_out: bool
    tokens: npt.NDArray[np.uint16]
    """`[num_tokens]`; every document ends with `<|endoftext|>` (id 0)."""

    @property
    def kind(self) -> str:
        """The part of the label before the first dot."""
        return self.label.split(".")[0]

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """Where each document begins, `[num_documents]`."""
        ends = np.flatnonzero(self.tokens == 0)
        return np.concatenate([np.zeros(1, dtype=np.int64), ends[:-1] + 1])


def load_streams(corpus: Path, cache: Path, vocab_size: int) -> tuple[Tokenizer, list[Stream]]:
    """The tokenizer and all streams, from the cache where it is filled, else made and kept there."""
    if not (cache / TOKENIZER).exists():
        _fill_cache(corpus, cache, vocab_size)
    with ThreadPoolExecutor() as pool:
        streams = list(pool.map(_read_stream, sorted(cache.glob("*.xz"))))
    return Tokenizer.from_file(str(cache / TOKENIZER)), streams


def _fill_cache(corpus: Path, cache: Path, vocab_size: int) -> None:
    """Train the tokenizer and tokenise the corpus; `tokenizer.json`, written last, marks a full cache."""
    cache.mkdir(parents=True, exist_ok=True)
    sources = read_sources(corpus)
    tokenizer = train_tokenizer(tokenizer_sample(sources), vocab_size)
    for source in sources:
        for stream in _tokenise(source, tokenizer):
            write_stream(cache, stream)
    tokenizer.save(str(cache / TOKENIZER))


def _tokenise(source: Source, tokenizer: Tokenizer) -> list[Stream]:
    """The streams of one source: text and conversations, each in both splits, empty ones left out."""
    texts: dict[tuple[str, bool], list[str]] = {}
    for document in source.documents():
        held_out = is_held_out(document)
        texts.setdefault((source.label, held_out), []).append(document)
        for turns in chat.conversations(source.kind, document):
            texts.setdefault((f"chat.{source.name}", held_out), []).append(chat.render(turns))
    return [
        Stream(label=label, is_held_out=held_out, tokens=_encode(documents, tokenizer))
        for (label, held_out), documents in texts.items()
    ]


def _encode(documents: list[str], tokenizer: Tokenizer) -> npt.NDArray[np.uint16]:
    end = tokenizer.token_to_id(SEPARATOR)
    parts = []
    for start in range(0, len(documents), _BATCH):
        for encoding in tokenizer.encode_batch(documents[start : start + _BATCH]):
            parts.append(np.array([*encoding.ids, end], dtype=np.uint16))
    return np.concatenate(parts)


def write_stream(cache: Path, stream: Stream, *, preset: int = 2) -> None:
    """Keep a stream in a cache folder, compressed by xz at `preset`."""
    split = "held" if stream.is_held_out else "train"
    path = cache / f"{stream.label}.{split}.xz"
    path.write_bytes(lzma.compress(stream.tokens.astype("<u2").tobytes(), preset=preset))


def _read_stream(path: Path) -> Stream:
    label, split, _ = path.name.rsplit(".", 2)
    tokens = np.frombuffer(lzma.decompress(path.read_bytes()), dtype="<u2").astype(np.uint16)
    return Stream(label=label, is_held_out=split == "held", tokens=tokens)
