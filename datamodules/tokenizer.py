"""Train the tokenizer of the embedded base: a byte-level BPE.

In:  texts. Out: a directory that `transformers` loads as a `PreTrainedTokenizerFast` (`tokenizer.json`,
`tokenizer_config.json`).

Every text survives the round trip exactly (emoji, control characters and odd spacing included). Digits stand alone, so
that years are copied digit by digit; only the number of a trace (a bracketed one, or a text that is nothing else) is
one token, so that the recurrent state holds it as one thing. A capitalised word is cut from the space before it: a name
is the same tokens after a space, after a bracket and at the start of a keyword field, so copying it is copying tokens.
The invented words of the fictional world are cut into their two syllables, each a token of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from datamodules.mumu_text import CARRIERS
from datamodules.world import world_questions, world_text
from datamodules.world_names import first_syllables, last_syllables, syllable_patterns

END_OF_TEXT = "<|endoftext|>"
_MIN_VOCABULARY = 257  # the 256 bytes and the end token


def train_tokenizer(texts: Iterable[str], vocab_size: int, out_dir: str | Path) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of at most `vocab_size` tokens on `texts`, save it under `out_dir` and return it.

    Deterministic: the same texts in the same order give the same file. Raises ValueError when `vocab_size` cannot hold
    the 256 bytes.
    """
    if vocab_size < _MIN_VOCABULARY:
        raise ValueError(f"vocab_size {vocab_size} is below {_MIN_VOCABULARY}: 256 bytes and {END_OF_TEXT}")
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"(?<=[\[(A])\d{1,3}(?=[\])])|^\d{1,3}$|\d"), behavior="isolated"),
            pre_tokenizers.Split(Regex(r"\p{Lu}\p{L}*"), behavior="isolated"),
            *(pre_tokenizers.Split(Regex(p), behavior="isolated") for p in syllable_patterns()),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(iter(texts), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=1_000_000,
    )
    fast.save_pretrained(str(out_dir))
    return fast


def world_corpus(
    seeds: Iterable[int] = range(1000, 1008), paragraphs: int = 3000, questions: int = 3000
) -> Iterator[str]:
    """The embedded tokenizer's training texts: of each seed, paragraphs and questions of training worlds.

    Many small worlds, all syllables of their names, and the frames that turns add around questions.
    """
    syllables = [*first_syllables(), *last_syllables()] * 20
    frames = list(CARRIERS) * 500
    worlds = (chain(world_text(seed, paragraphs), world_questions(seed, questions)) for seed in seeds)
    return chain(syllables, frames, chain.from_iterable(worlds))
