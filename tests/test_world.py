"""The fictional world: MuSiQue's invariants, held-out names, determinism and files."""

import hashlib
import json
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules import world
from datamodules.musique import SHAPES, load_graphs, normalise
from datamodules.world_facts import make_world
from datamodules.world_names import Names, belongs_to_dev
from datamodules.world_relations import RELATIONS
from tests.world_records import PHRASINGS, records

ROOT = str(Path(__file__).parents[1])


# -- wordings --------------------------------------------------------------------------------------------


def test_a_wording_identifies_its_sub_question():
    for forms in ("question", "noun", "ask"):
        texts = Counter(normalise(getattr(p, forms)) for _, p in PHRASINGS)
        assert [text for text, n in texts.items() if n > 1] == []


@pytest.mark.parametrize("relation", RELATIONS, ids=lambda r: r.name)
def test_a_relation_is_asked_in_several_ways_and_its_slots_are_in_order(relation):
    assert len(relation.phrasings) >= 2 and len(relation.statements) >= 2
    slots = ["{0}", "{1}"][: relation.arity]
    for phrasing in relation.phrasings:
        for text in (phrasing.question, phrasing.noun, phrasing.ask):
            assert re.findall(r"\{\d\}", text) == slots
        assert phrasing.ask.endswith("?")
    for statement in relation.statements:
        assert statement.count("{o}") == 1 and statement.count("{1}") == relation.arity - 1


def test_most_sub_questions_are_questions_and_a_minority_is_relational():
    nodes = [n["question"] for r in records("train") for n in r["question_decomposition"]]
    share = sum(" >> " in text for text in nodes) / len(nodes)
    assert 0.1 < share < 0.35


# -- records ---------------------------------------------------------------------------------------------


def test_records_pass_the_loader_and_cover_all_shapes(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in records("train")), encoding="utf-8")
    graphs, rejected = load_graphs([path])
    assert not rejected and len(graphs) == 600
    shapes = Counter(graph.shape for graph in graphs)
    assert set(shapes) == set(SHAPES)
    assert min(shapes.values()) >= 20
    for graph in graphs:
        for node in graph.nodes:
            assert node.refs == tuple(r - 1 for r in SHAPES[graph.shape][node.i + 1])


@pytest.mark.parametrize("split", ["train", "dev"])
def test_every_answer_stands_in_its_paragraph_and_contexts_have_twenty(split):
    for record in records(split):
        paragraphs = record["paragraphs"]
        assert len(paragraphs) == 20
        assert [p["idx"] for p in paragraphs] == list(range(20))
        assert len({(p["title"], p["paragraph_text"]) for p in paragraphs}) == 20
        nodes = record["question_decomposition"]
        supports = [n["paragraph_support_idx"] for n in nodes]
        assert len(set(supports)) == len(nodes)
        assert {p["idx"] for p in paragraphs if p["is_supporting"]} == set(supports)
        for node in nodes:
            text = paragraphs[node["paragraph_support_idx"]]["paragraph_text"]
            assert f" {normalise(node['answer'])} " in f" {normalise(text)} "
        assert record["answer"] == nodes[-1]["answer"]
        joined = " ".join(p["paragraph_text"] for p in paragraphs)
        assert all(re.search(rf"\b{alias}\b", joined) for alias in record["answer_aliases"])


def test_paragraphs_have_two_to_four_sentences_and_tell_something():
    facts = make_world(random.Random(5), "train", 600)
    for paragraph in facts.paragraphs:
        sentences = re.findall(r"[^.]+\.", paragraph.text)
        assert 2 <= len(sentences) <= 4, paragraph.text
        assert paragraph.text.startswith(paragraph.title)
        assert "{" not in paragraph.text and "  " not in paragraph.text


def test_no_answer_leaks_into_a_question():
    for split in ("train", "dev"):
        for record in records(split):
            question = f" {normalise(record['question'])} "
            for node in record["question_decomposition"]:
                assert f" {normalise(node['answer'])} " not in question, record["question"]


def test_the_same_fact_in_the_same_words_has_the_same_id_and_nothing_else_has_it():
    of_id: dict[int, tuple] = {}
    of_fact: dict[tuple, int] = {}
    for record in records("train"):
        nodes = record["question_decomposition"]
        for node in nodes:
            text = re.sub(r"#(\d+)", lambda m, nodes=nodes: nodes[int(m[1]) - 1]["answer"], node["question"])
            fact = (text, node["answer"])
            assert of_id.setdefault(node["id"], fact) == fact
            assert of_fact.setdefault(fact, node["id"]) == node["id"]
        assert record["id"].partition("__")[2] == "_".join(str(n["id"]) for n in nodes)


def test_no_question_is_an_effective_duplicate_of_another():
    seen = set()
    for record in records("train"):
        sids = [n["id"] for n in record["question_decomposition"]]
        answers = tuple(sorted(normalise(n["answer"]) for n in record["question_decomposition"]))
        keys = [tuple(sids[-2:])] + [
            (answers, tuple(sorted(sids[:i] + sids[i + 1 :]))) for i in range(len(sids))
        ]
        assert not seen.intersection(keys)
        seen.update(keys)


def test_bridges_are_shared_by_many_questions():
    count = Counter(
        node["answer"]
        for record in records("train", 42, 2000, False)
        for node in record["question_decomposition"][:-1]
    )
    uses = sum(count.values())
    assert sum(n for n in count.values() if n >= 3) > 0.6 * uses


def test_without_distractors_only_the_supports_remain_and_the_facts_are_the_same():
    slim = records("train", paragraphs=False)
    assert all(len(r["paragraphs"]) == len(r["question_decomposition"]) for r in slim)
    assert all(p["is_supporting"] for r in slim for p in r["paragraphs"])


# -- names -----------------------------------------------------------------------------------------------


def _words(items) -> set[str]:
    return {w for r in items for p in r["paragraphs"] for w in re.findall(r"[A-Z][a-z]+", p["title"])}


def test_splits_share_no_name_no_stem_no_year_and_no_id():
    # What both splits have in common is the ordinary part of names ("River", "Prize"), as any other world has it.
    common = _words(records("train")) & _words(records("dev"))
    assert 20 < len(common) < 100
    assert common <= _words(records("train", 7, 2000)) and common <= _words(records("dev", 8, 2000))
    for seed in (42, 7):
        train, dev = records("train"), records("dev", seed)
        titles = [{p["title"] for r in items for p in r["paragraphs"]} for items in (train, dev)]
        answers = [
            {n["answer"] for r in items for n in r["question_decomposition"]} for items in (train, dev)
        ]
        ids = [{n["id"] for r in items for n in r["question_decomposition"]} for items in (train, dev)]
        for a, b in (titles, answers, ids):
            assert not a & b


def test_tens_of_thousands_of_distinct_names():
    names = Names(random.Random(1), "train")
    stems = [names.stem() for _ in range(60_000)]
    assert len({s.lower() for s in stems}) == 60_000
    assert not any(belongs_to_dev(s) for s in stems[:1000])
    assert max(map(len, stems)) <= 14


@given(st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_no_entity_name_contains_another(seed):
    facts = make_world(random.Random(seed), "dev", 40)
    names = [normalise(e.name) for e in facts.entities if e.type not in ("year", "time", "quantity")]
    text = Counter(word for name in names for word in set(name.split()))
    assert len(set(names)) == len(names)
    for name in names:
        assert any(text[word] == 1 for word in name.split()), name


# -- files -----------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_records_and_another_seed_others():
    again = list(world.world_records("train", 42, 600))
    assert json.dumps(again) == json.dumps(list(records("train")))
    other = list(world.world_records("train", 43, 600))
    assert not {r["question"] for r in other} & {r["question"] for r in again}


def test_records_do_not_depend_on_the_hash_seed():
    code = (
        "import hashlib, json; from datamodules.world import world_records;"
        "print(hashlib.sha1(json.dumps(list(world_records('dev', 3, 60))).encode()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed, "PYTHONPATH": ROOT}, capture_output=True,
            text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(digests) == 1


def test_texts_for_the_tokenizer_are_training_names_only():
    texts = list(world.world_text(9, 2500))
    assert len(texts) == len(set(texts)) == 2500
    held_out = {e.name for e in make_world(random.Random(1), "dev", 500).entities}
    assert not held_out & {text.partition("\n")[0] for text in texts}
    assert len(list(world.world_questions(9, 30))) == 30


def test_bad_numbers_are_refused():
    with pytest.raises(ValueError, match="too small"):
        world.world_records("train", 1, 5)
    with pytest.raises(ValueError, match="seed"):
        world.world_records("train", -1)
    with pytest.raises(ValueError, match="split"):
        world.world_records("test", 1)


def _bytes(directory):
    return {p.relative_to(directory): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def test_a_world_directory_holds_sources_and_dialogues_and_is_the_same_every_time(small_world, tmp_path):
    files = _bytes(small_world)
    names = {str(name) for name in files}
    assert {"source/train.jsonl", "source/dev.jsonl", "corpus.jsonl", "manifest.json", "world.json"} <= names
    assert {
        f"{stage}/{split}.jsonl" for stage in ("stage1", "short", "long") for split in ("train", "dev")
    } <= names
    manifest = json.loads(files[next(n for n in files if n.name == "manifest.json")])
    # Nothing is lost on the way: every question is a valid, distinct graph, and train keeps clear of dev.
    assert manifest["counts"]["source_questions"]["train"] == {"accepted": 400, "distinct": 400, "used": 400}
    assert manifest["counts"]["source_questions"]["dev"] == {"accepted": 120, "distinct": 120, "used": 120}
    assert not manifest["rejections"]["purged/train"]
    world.build_world(tmp_path / "again", 42, 400, 120, paragraphs=False)
    assert _bytes(tmp_path / "again") == files


def test_only_a_world_is_overwritten(tmp_path):
    out = tmp_path / "w"
    world.build_world(out, 1, 40, 20, paragraphs=False)
    with pytest.raises(FileExistsError, match="--overwrite"):
        world.build_world(out, 1, 40, 20)
    (out / "notes.txt").write_text("mine")
    world.build_world(out, 2, 40, 20, paragraphs=False, overwrite=True)
    assert (out / "notes.txt").read_text() == "mine"
    assert json.loads((out / "world.json").read_text())["seed"] == 2
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(FileExistsError, match="holds no world"):
        world.build_world(tmp_path / "mine", overwrite=True)
    assert (tmp_path / "mine" / "thesis.txt").exists()
    with pytest.raises(FileExistsError, match="is a file"):
        world.build_world(tmp_path / "mine" / "thesis.txt")


def test_the_default_world_is_built_once_and_again_when_its_recipe_is_old(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACE_MEMORY_HOME", str(tmp_path / "home"))
    first = world.default_world(5, 40, 20)
    stamp = (first / "manifest.json").stat().st_mtime_ns
    assert first.parent == tmp_path / "home"
    assert world.default_world(5, 40, 20) == first
    assert (first / "manifest.json").stat().st_mtime_ns == stamp
    recipe = json.loads((first / "world.json").read_text()) | {"generator_version": "0"}
    (first / "world.json").write_text(json.dumps(recipe))
    (first / "corpus.jsonl").write_text("stale")
    assert world.default_world(5, 40, 20) == first
    assert (first / "corpus.jsonl").read_text() != "stale"
    assert [p.name for p in first.parent.iterdir()] == [first.name]


def test_an_interrupted_default_build_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACE_MEMORY_HOME", str(tmp_path))

    def stop(what, done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        world.default_world(5, 40, 20, progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_writes_a_world_and_says_what_is_wrong(tmp_path, capsys):
    args = ["--out", str(tmp_path / "w"), "--seed", "3", "--questions", "40", "--dev-questions", "20"]
    assert world.main(args) == 0
    assert (tmp_path / "w" / "short" / "train.jsonl").exists()
    assert world.main(args) == 2
    assert "--overwrite" in " ".join(capsys.readouterr().err.split())
    assert world.main(["--out", str(tmp_path / "v"), "--questions", "3"]) == 2
    assert "too small" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "v").exists()


def test_a_changed_generator_needs_a_new_version():
    """Worlds in users' caches are re-used while GENERATOR_VERSION is theirs: bump it together with this digest."""
    digest = hashlib.sha256(json.dumps(list(world.world_records("dev", 42, 60))).encode()).hexdigest()[:12]
    assert (world.GENERATOR_VERSION, digest) == ("2", "c88f3f634b3d")
