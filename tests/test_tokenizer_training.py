"""The trained tokenizer: exact round trips, lone digits, names cut alike everywhere, the same file every time."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from datamodules.tokenizer import END_OF_TEXT, train_tokenizer, world_corpus
from datamodules.world import world_records
from inference.tokens import PlanTokenizer
from inference.traces import TraceDraft, TracePlan

ROOT = str(Path(__file__).parents[1])


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    out = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(world_corpus(range(1000, 1002), 1500, 1500), 2048, out)
    return out


@pytest.fixture(scope="module")
def tokenizer(directory):
    return AutoTokenizer.from_pretrained(str(directory))


def _ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_the_directory_is_a_plain_fast_tokenizer(tokenizer):
    assert tokenizer.is_fast and len(tokenizer) <= 2048
    assert tokenizer.bos_token == tokenizer.eos_token == END_OF_TEXT
    assert tokenizer.bos_token_id == 0
    assert _ids(tokenizer, END_OF_TEXT) == [0]
    assert tokenizer("Who founded it?")["input_ids"] == _ids(tokenizer, "Who founded it?")


@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_text_survives(tokenizer, text):
    if END_OF_TEXT not in text:
        assert tokenizer.decode(_ids(tokenizer, text)) == text


AWKWARD = (
    " two  spaces ", "tabs\t\nand\r\n lines", "😀👩‍🚀 e\u0301", "\x00\x01\x7f\u200d", "it 's , he ' ll . n't",
    "[PLAN] [A12]", "É ß Ǆ",
)  # fmt: skip


@pytest.mark.parametrize("text", AWKWARD)
def test_awkward_texts_survive(tokenizer, text):
    assert tokenizer.decode(_ids(tokenizer, text)) == text


def test_digits_stand_alone(tokenizer):
    assert [tokenizer.decode([i]) for i in _ids(tokenizer, "1987")] == list("1987")
    for token in tokenizer.get_vocab():
        assert sum(c.isdigit() and c.isascii() for c in token) <= 1


def test_a_name_is_the_same_tokens_wherever_it_stands(tokenizer):
    for record in world_records("dev", 11, 40, paragraphs=False):
        for paragraph in record["paragraphs"]:
            name = paragraph["title"]
            alone = _ids(tokenizer, name)
            for before, after in (("Who founded ", "?"), ("(", ")"), ("", " >> performer"), ("\n", " and")):
                ids = _ids(tokenizer, before + name + after)
                start = len(_ids(tokenizer, before))
                assert ids[start : start + len(alone)] == alone


def test_template_words_are_whole_and_names_are_syllables(tokenizer):
    for word in (" founded", " person", " which", " university", " performer"):
        assert len(_ids(tokenizer, word)) == 1
    lengths = [
        len(_ids(tokenizer, word))
        for record in world_records("dev", 12, 40, paragraphs=False)
        for word in record["paragraphs"][0]["title"].split()
    ]
    assert 1.5 < sum(lengths) / len(lengths) < 5


def test_plans_survive_too(directory):
    tokens = PlanTokenizer.from_pretrained(directory).extend()
    plan = TracePlan((TraceDraft(1, "Zolkor Prize >> named after", "Zolkor Prize after", ()),
                      TraceDraft(2, "Where was [A1] born?", "[A1] born", (1,))))  # fmt: skip
    ids, _ = tokens.encode_plan(plan)
    assert tokens.parse_plan(ids, 1) == plan


def test_the_same_texts_give_the_same_file_in_another_process(tmp_path):
    code = (
        "import sys; from datamodules.tokenizer import *;"
        "train_tokenizer(world_corpus([1000], 300, 300), 700, sys.argv[1])"
    )
    contents = set()
    for hash_seed in ("1", "2"):
        out = tmp_path / hash_seed
        subprocess.run(
            [sys.executable, "-c", code, str(out)],
            check=True,
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ROOT},
        )
        contents.add((out / "tokenizer.json").read_bytes())
    assert len(contents) == 1


def test_a_vocabulary_below_the_bytes_is_refused(tmp_path):
    with pytest.raises(ValueError, match="257"):
        train_tokenizer(["a"], 200, tmp_path)


def test_a_name_is_its_syllables_and_a_trace_number_one_token(tmp_path):
    """The same tokens wherever a name stands; years stay single digits."""
    texts = [*world_corpus(range(1000, 1001), 200, 200), *(f"({n}) / [{n}]\n[A{n}]" for n in range(1, 300))]
    tokens = PlanTokenizer(train_tokenizer(texts, 4089, tmp_path))

    def pieces(text: str) -> list[str]:
        return [tokens.decode([index]) for index in tokens.encode_text(text)]

    assert pieces("Kantem") == ["Kan", "tem"] and pieces("Who knew Kantem?")[-3:] == ["Kan", "tem", "?"]
    assert pieces("Kantemville")[:2] == ["Kan", "tem"] and pieces("Kartinia")[:2] == ["Kar", "tin"]
    for number in (7, 28, 285):
        assert pieces(str(number)) == [str(number)]
        assert str(number) in pieces(f"Who is [A{number}]?") and str(number) in pieces(f"[{number}]")
    assert pieces("1823") == list("1823")
