"""The byte-level BPE tokenizer of the bundled model.

Words keep their leading space, digits stand alone (so that sums are learnable), punctuation runs and
white space are pieces of their own. Every byte is in the alphabet, so nothing is ever unknown.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from bench.models import chat
from bench.models.corpus import SEPARATOR, Source, is_held_out

PAD = "<|pad|>"
SPECIAL_TOKENS = (SEPARATOR, PAD, chat.USER, chat.ASSISTANT, chat.END)
_PIECES = r"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+|[0-9]| {2,}(?=\S)| ?[^\sA-Za-z0-9]+|\s+"
_CHARACTERS_PER_KIND = 5_000_000


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> Tokenizer:
    """A tokenizer of `vocab_size` tokens, the special ones first (ids 0 to 4)."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_PIECES), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def tokenizer_sample(sources: list[Source], seed: int = 0) -> Iterator[str]:
    """Training documents to learn the merges from: about five million characters of each kind."""
    draw = random.Random(seed)
    for kind in sorted({source.kind for source in sources}):
        documents = [text for source in sources if source.kind == kind for text in source.documents()]
        draw.shuffle(documents)
        taken = 0
        for document in documents:
            if taken > _CHARACTERS_PER_KIND:
                break
            if not is_held_out(document):
                taken += len(document)
                yield document


def wrap_tokenizer(tokenizer: Tokenizer, max_length: int) -> PreTrainedTokenizerFast:
    """The same tokenizer as transformers loads it, with the chat template.

    `add_bos_token` stays off: documents start bare, and `<|endoftext|>` only ever ends one.
    """
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SEPARATOR,
        eos_token=SEPARATOR,
        pad_token=PAD,
        additional_special_tokens=[chat.USER, chat.ASSISTANT, chat.END],
        model_max_length=max_length,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = chat.TEMPLATE
    return wrapped
