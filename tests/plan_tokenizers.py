"""Small byte-level tokenizers and plan strategies for the tests of plans.

The tokenizers are made on the spot: trained, merging across every border, NeoX-like, and one that lacks bytes.
"""

from __future__ import annotations

from functools import cache

from hypothesis import settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from inference.tokens import PlanTokenizer
from inference.traces import STRUCTURAL_TOKENS, TraceDraft, TracePlan

# Examples are the same in every run, and a busy machine fails nothing.
settings.register_profile("plans", deadline=None, derandomize=True)
settings.load_profile("plans")

EOS = "<|endoftext|>"
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
SPELL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
WILD = (
    "[A |[A1| [A2|[A1]|A1|1]|12|120|28]|][|][1|]?| [|[[|]]|[]|12]| [A12] x|99|00|01|10|[A0|\n[|]\n|KW]|[/|[\\|"
    "é|éx|日本| 日|\u3000|\u00a0|\u2028|\u2003|x\t|?\u3000|[A\n|1\n|😀|[1][2|[12|]["
).split("|")


def wrap(backend: Tokenizer) -> PlanTokenizer:
    return PlanTokenizer(
        PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS, bos_token=EOS)
    ).extend()


def byte_level(words: list[str], use_regex: bool = True, without: bytes = b"") -> Tokenizer:
    """Bytes plus the given words, each merged from left to right (their prefixes become tokens too)."""
    gone = {SPELL.pre_tokenize_str(bytes([b]).decode("latin-1"))[0][0][-1] for b in without}
    vocab = {char: i for i, char in enumerate(char for char in ALPHABET if char not in gone)}
    merges = []
    for word in words:
        spelled = "".join(piece for piece, _ in SPELL.pre_tokenize_str(word))
        for end in range(1, len(spelled)):
            if spelled[: end + 1] not in vocab:
                vocab[spelled[: end + 1]] = len(vocab)
                merges.append((spelled[:end], spelled[end]))
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    backend.decoder = decoders.ByteLevel()
    return backend


@cache
def trained() -> PlanTokenizer:
    """A tiny trained BPE, like the embedded base's."""
    backend = byte_level([])
    text = [
        "Which label was bought by [A28] in the UK?",
        "label bought [A28] UK",
        "[3][5]",
        "Who founded Oriole Records?",
    ]
    special = [EOS]
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=ALPHABET, special_tokens=special, show_progress=False
    )
    backend.train_from_iterator(text * 4, trainer)
    return wrap(backend)


@cache
def wild() -> PlanTokenizer:
    """Merges cross every border: brackets with digits, half characters with text, line breaks with brackets."""
    return wrap(byte_level(WILD, use_regex=False))


@cache
def neox() -> PlanTokenizer:
    """NFC normaliser, prefix-space option on, multi-digit numbers, runs of spaces as ordinary added tokens."""
    backend = byte_level([*WILD, *map(str, range(2, 140))])
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.add_tokens([AddedToken("  ", normalized=True), AddedToken("   ", normalized=True)])
    return wrap(backend)


@cache
def ascii_only() -> PlanTokenizer:
    """Lacks the bytes that would finish a character of more than one byte."""
    return wrap(byte_level(["[A", "]["], without=bytes(range(0xA2, 0xA8))))


MAKERS = {"trained": trained, "wild": wild, "neox": neox}

FRAGMENTS = (
    *STRUCTURAL_TOKENS,
    *(
        EOS,
        "[\\KW]",
        "[\\\\DEP]",
        "\\",
        "[",
        "]",
        "[/",
        "KW]",
        "[A1]",
        "[A12]",
        "[A0]",
        "[A",
        "A_1",
        "A1]",
        "<|",
    ),
    *(
        "😀",
        "é",
        "e\u0301",
        "\x00",
        "\n",
        "\t",
        " ",
        "  ",
        "   ",
        "\u3000",
        "日本",
        "28",
        "What is",
        "\ufeff",
        "’s",
    ),
)
fragments = st.sampled_from(FRAGMENTS)
texts = st.one_of(
    st.text(max_size=20), st.lists(st.one_of(fragments, st.text(max_size=3)), max_size=8).map("".join)
)
drafts = st.builds(
    TraceDraft,
    id=st.integers(1, 2000),
    sub_question=texts,
    keywords=texts,
    deps=st.lists(st.integers(1, 2000), max_size=4).map(tuple),
)
any_plans = st.lists(drafts, max_size=4).map(lambda traces: TracePlan(tuple(traces)))


@st.composite
def sound_plans(draw: st.DrawFn, first_id: int | None = None) -> tuple[int, TracePlan]:
    """(first id, a plan that `check_plan` accepts), of printable text with references."""
    first = draw(st.sampled_from([1, 2, 9, 10, 99, 120])) if first_id is None else first_id
    words = st.sampled_from("Which label was bought by the UK ? [ ] [Alaska] 12 é 日本 [KW] 😀 [A 's".split())
    traces = []
    for own_id in range(first, first + draw(st.integers(1, 3))):
        earlier = st.integers(1, own_id - 1) if own_id > 1 else st.nothing()
        named = st.one_of(words, earlier.map(lambda n: f"[A{n}]")) if own_id > 1 else words
        question = " ".join(draw(st.lists(named, min_size=1, max_size=6)))
        keywords = " ".join(draw(st.lists(named, max_size=4)))
        deps = draw(st.lists(earlier, max_size=3, unique=True)) if own_id > 1 else []
        traces.append(TraceDraft(own_id, question, keywords, tuple(deps)))
    return first, TracePlan(tuple(traces))
