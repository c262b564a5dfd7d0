"""Documents of the training corpus, and which of them are never trained on.

A corpus is a folder of `P.KIND.SOURCE.txt.xz` files: UTF-8 documents parted by `<|endoftext|>`.
A document is held out when the first byte of the SHA-1 of its text is below 4 (1.6 % of documents).
The rule looks at the text alone, so it holds across re-orderings, tokenizers and later runs.
"""

from __future__ import annotations

import hashlib
import lzma
from dataclasses import dataclass
from pathlib import Path

SEPARATOR = "<|endoftext|>"
HELD_OUT_BELOW = 4
KINDS = ("story", "dialog", "math", "encyc", "code", "docs", "prose")


@dataclass(frozen=True)
class Source:
    """One file of the corpus."""

    kind: str
    name: str
    path: Path

    @property
    def label(self) -> str:
        """`kind.name`, the key under which its tokens are kept."""
        return f"{self.kind}.{self.name}"

    def documents(self) -> list[str]:
        """All documents of the file, surrounding newlines stripped, empty ones left out."""
        text = lzma.decompress(self.path.read_bytes()).decode("utf-8")
        stripped = (document.strip("\n") for document in text.split(SEPARATOR))
        return [document for document in stripped if document.strip()]


def is_held_out(document: str) -> bool:
    """Whether a document (surrounding newlines stripped) belongs to the held-out split."""
    return hashlib.sha1(document.encode("utf-8"), usedforsecurity=False).digest()[0] < HELD_OUT_BELOW


def read_sources(folder: Path) -> list[Source]:
    """Every source of a corpus folder, ordered by label.

    Raises `FileNotFoundError` when there is none, `ValueError` on an unknown kind.
    """
    sources = []
    for path in sorted(folder.glob("P.*.*.txt.xz")):
        _, kind, name = path.name.removesuffix(".txt.xz").split(".", 2)
        if kind not in KINDS:
            raise ValueError(f"{path.name}: kind {kind!r} is not one of {', '.join(KINDS)}")
        sources.append(Source(kind=kind, name=name, path=path))
    if not sources:
        raise FileNotFoundError(f"no P.KIND.SOURCE.txt.xz in {folder}")
    return sources
