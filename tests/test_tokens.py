"""Plans as token ids: exact round trip, loss mask, plain text that stays plain, saving, errors."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from inference.tokens import PlanTokenizer
from inference.traces import (
    STRUCTURAL_TOKENS,
    PlanParseError,
    TraceDraft,
    TracePlan,
    linearise,
    sanitise_query,
)
from tests.plan_tokenizers import EOS, MAKERS, any_plans, ascii_only, byte_level, neox, texts, trained, wrap

names = st.sampled_from(sorted(MAKERS))


@given(names, any_plans)
def test_round_trip_for_any_plan(name, plan):
    tokens = MAKERS[name]()
    ids, loss = tokens.encode_plan(plan)
    assert len(ids) == len(loss)
    assert tokens.parse_plan(ids) == plan


@given(names, texts)
def test_text_stays_text(name, text):
    tokens = MAKERS[name]()
    ids = tokens.encode_text(text)
    assert tokens.decode(ids) == text
    assert not set(ids) & set(tokens.tokenizer.get_added_vocab().values())


@given(names, st.text(alphabet=st.characters(), max_size=8) | texts)
def test_a_query_takes_one_line(name, text):
    tokens = MAKERS[name]()
    ids = tokens.encode_query(text)
    assert not set(ids) & set(tokens.tokenizer.get_added_vocab().values())
    read = tokens.decode(ids)
    assert read.endswith("\n") and read.count("\n") == 1
    if text.isprintable():
        assert read == sanitise_query(text).strip() + "\n"


def test_only_the_own_id_carries_no_loss():
    tokens = trained()
    traces = (TraceDraft(128, "Who is [A128]?", "128", (12, 128)), TraceDraft(129, "Q", "", ()))
    ids, loss = tokens.encode_plan(TracePlan(traces))
    assert tokens.decode([i for i, carries in zip(ids, loss, strict=True) if not carries]) == "128129"
    assert tokens.decode(ids) == linearise(TracePlan(traces))
    structural = tokens.structural
    after_trace = [i for i, token in enumerate(ids) if token == structural["[TRACE]"]]
    for start in after_trace:
        stop = ids.index(structural["[SubQ]"], start)
        assert loss[start] and loss[stop] and not any(loss[start + 1 : stop])


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_saved_and_loaded_it_is_the_same(name, tmp_path):
    tokens = MAKERS[name]()
    tokens.save(tmp_path)
    loaded = PlanTokenizer.from_pretrained(tmp_path)
    plan = TracePlan((TraceDraft(7, "Who [KW]  is [A3] 日本?", "[A3]", (3,)),))
    assert loaded.structural == tokens.structural
    assert loaded.fingerprint() == tokens.fingerprint() == loaded.extend().fingerprint()
    assert loaded.encode_plan(plan) == tokens.encode_plan(plan)
    assert loaded.bos_id == tokens.bos_id and loaded.n_tokens == tokens.n_tokens
    stock = AutoTokenizer.from_pretrained(tmp_path)
    assert (
        stock(linearise(plan).replace("[KW] ", "").replace("  ", " "))["input_ids"][0]
        == tokens.structural["[PLAN]"]
    )
    assert PlanTokenizer(stock).encode_plan(plan) == tokens.encode_plan(plan)


def test_extending_twice_changes_nothing_and_appends_at_the_end():
    backend = byte_level(["[A"])
    before = backend.get_vocab_size()
    tokens = wrap(backend)
    assert sorted(tokens.structural.values()) == list(
        range(before + 1, before + 8)
    )  # eos took the first free id
    state = (tokens.fingerprint(), tokens.n_tokens, dict(tokens.structural))
    tokens.extend()
    assert (tokens.fingerprint(), tokens.n_tokens, dict(tokens.structural)) == state
    assert list(tokens.structural) == list(STRUCTURAL_TOKENS)


def test_fingerprint_ignores_run_time_padding_but_not_the_vocabulary():
    tokens = wrap(byte_level(["[A"]))
    before = tokens.fingerprint()
    tokens.tokenizer.backend_tokenizer.enable_padding(pad_id=0, pad_token=EOS)
    tokens.tokenizer.backend_tokenizer.enable_truncation(4)
    assert tokens.fingerprint() == before
    assert tokens.encode_text("longer than four tokens") == wrap(byte_level(["[A"])).encode_text(
        "longer than four tokens"
    )
    assert wrap(byte_level(["[B"])).fingerprint() != before


def test_token_bytes_cover_the_vocabulary():
    tokens = neox()
    table = tokens.token_bytes
    assert len(table) == tokens.n_tokens == len(tokens.tokenizer)
    assert {t for t in table if isinstance(t, str)} == {*STRUCTURAL_TOKENS, EOS, "  ", "   "}
    assert {bytes([b]) for b in range(256)} <= {t for t in table if isinstance(t, bytes)}


def test_a_literal_in_the_models_own_vocabulary_cannot_come_out_of_text():
    backend = byte_level([EOS], use_regex=False)  # merges spell the very literal
    tokens = wrap(backend)
    assert backend.encode(EOS).ids == [tokens.bos_id]
    for text in (EOS, f"a{EOS}{EOS}b", EOS[:-1] + EOS):
        ids = tokens.encode_text(text)
        assert tokens.bos_id not in ids and tokens.decode(ids) == text


def test_queries_are_sanitised():
    tokens = trained()
    assert tokens.decode(tokens.encode_query(" Is [A12]\r\n [PLAN] \ud800? ")) == "Is (A12) [PLAN] ??\n"
    assert tokens.decode(tokens.encode_query("")) == "\n"


@settings(max_examples=50)
@given(any_plans.filter(lambda plan: len(plan) > 0), st.randoms(use_true_random=False))
def test_a_damaged_plan_raises_or_still_round_trips(plan, random):
    tokens = trained()
    ids, _ = tokens.encode_plan(plan)
    damaged = list(ids)
    damaged[random.randrange(len(ids))] = random.randrange(tokens.n_tokens + 5)
    try:
        found = tokens.parse_plan(damaged)
    except PlanParseError:
        return
    assert tokens.parse_plan(tokens.encode_plan(found)[0]) == found


def test_parse_plan_checks_the_namespace_and_refuses_foreign_tokens():
    tokens = neox()
    ids, _ = tokens.encode_plan(TracePlan((TraceDraft(3, "Who?", "", (2,)),)))
    assert tokens.parse_plan(ids, 3).traces[0].id == 3
    with pytest.raises(PlanParseError, match="should have identifier 4"):
        tokens.parse_plan(ids, 4)
    at = ids.index(tokens.structural["[KW]"])
    with pytest.raises(PlanParseError, match="cannot stand inside a plan"):
        tokens.parse_plan([*ids[:at], tokens.bos_id, *ids[at:]])
    with pytest.raises(PlanParseError, match="unused row"):
        tokens.parse_plan([*ids[:at], tokens.n_tokens, *ids[at:]])
    with pytest.raises(PlanParseError, match="not valid UTF-8"):
        tokens.parse_plan([*ids[:at], tokens.token_bytes.index(b"\xe6"), *ids[at:]])
    spaces = tokens.token_bytes.index("  ")  # an added token, but ordinary text
    assert tokens.parse_plan([*ids[:at], spaces, *ids[at:]]).traces[0].sub_question == "Who?  "


def test_errors_speak_to_the_user(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json does not exist"):
        PlanTokenizer.from_pretrained(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text('{"version": ', encoding="utf-8")
    with pytest.raises(ValueError, match="half written"):
        PlanTokenizer.from_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0"}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        PlanTokenizer.from_pretrained(tmp_path)
    words = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(ValueError, match="byte-level BPE tokenizer is needed"):
        PlanTokenizer(PreTrainedTokenizerFast(tokenizer_object=words))
    bare = PlanTokenizer(PreTrainedTokenizerFast(tokenizer_object=byte_level([])))
    with pytest.raises(ValueError, match=r"call PlanTokenizer\.extend"):
        bare.encode_plan(TracePlan(()))
    with pytest.raises(ValueError, match="neither a bos nor an eos"):
        _ = bare.bos_id
    with pytest.raises(ValueError, match="lone surrogate"):
        trained().encode_text("\ud800")
    with pytest.raises(ValueError, match="cannot spell"):
        ascii_only().encode_text("日本 café ¥ 語 £ ā ģ 本部")
