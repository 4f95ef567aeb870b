"""The fictional world: a question determines its plan.

Proved by an independent reader (`_Reader`) that knows the wordings and the names and nothing else: it parses every
composed question back into sub-questions and must find exactly one reading, the gold one.
"""

import json
import random
import re
from collections import Counter
from functools import cache

import pytest

from datamodules import mumu, world
from datamodules.mumu_text import CARRIERS, Wording
from datamodules.musique import load_graphs
from datamodules.world_facts import make_world
from datamodules.world_questions import QuestionMaker
from datamodules.world_relations import RELATIONS, node_templates
from tests.world_records import PHRASINGS, records


class _Reader:
    """All readings of a text as a tree of wordings, given the names of the world and their types."""

    def __init__(self, types: dict[str, set[str]]):
        self._types = types
        self._nouns = [(r, p, self._pattern(p.noun)) for r, p in PHRASINGS]
        self._asks = [(r, p, self._pattern(p.ask)) for r, p in PHRASINGS]
        self.noun = cache(self._noun)

    @staticmethod
    def _pattern(template: str) -> list[str]:
        return re.split(r"\{\d\}", template)

    def _noun(self, text: str) -> tuple:
        """Readings (type, tree) of a noun phrase; a tree is a name or (phrasing, children)."""
        found = [(kind, text) for kind in sorted(self._types.get(text, ()))]
        return tuple(found + self._match(text, self._nouns))

    def _match(self, text: str, table: list) -> list:
        out = []
        for relation, phrasing, parts in table:
            if text.startswith(parts[0]) and text.endswith(parts[-1]):
                for slots in self._splits(text[len(parts[0]) : len(text) - len(parts[-1])], parts[1:-1]):
                    readings = [
                        [(kind, tree) for kind, tree in self.noun(slot) if kind in allowed]
                        for slot, allowed in zip(slots, relation.subjects, strict=True)
                    ]
                    combos = [()]
                    for options in readings:
                        combos = [(*combo, tree) for combo in combos for _, tree in options]
                    out += [(relation.object, (phrasing, combo)) for combo in combos]
        return out

    @staticmethod
    def _splits(text: str, separators: list[str]):
        if not separators:
            yield (text,)
            return
        at = text.find(separators[0])
        while at >= 0:
            yield (text[:at], text[at + len(separators[0]) :])
            at = text.find(separators[0], at + 1)

    def plans(self, question: str) -> list[list[str]]:
        return [self._flatten(tree) for tree in self.trees(question)]

    def trees(self, question: str) -> list:
        question = question[:1].upper() + question[1:]
        for opener in ("Tell me, ", "I would like to know: ", "Please find out: "):
            if question.startswith(opener):
                question = question[len(opener)].upper() + question[len(opener) + 1 :]
        for lead in (
            r"Consider (.+)\. (.+)",
            r"Think of (.+)\. (.+)",
            r"Take (.+): (.+)",
            r"Starting from (.+), (.+)",
        ):
            if found := re.fullmatch(lead, question):
                asked = found[2][0].upper() + found[2][1:]
                phrase = re.search(rf"\bthat ({'|'.join({r.object for r in RELATIONS})})\b", asked)
                full = asked[: phrase.start()] + found[1] + asked[phrase.end() :]
                return [tree for _, tree in self._match(full, self._asks)]
        return [tree for _, tree in self._match(question, self._asks)]

    def _flatten(self, tree) -> list[str]:
        steps: list[str] = []
        self.unfold(tree, steps, lambda name: name, "#{}", 1)
        return steps

    def unfold(self, tree, steps: list[str], name, reference: str, first: int) -> str:
        """Append the sub-questions of a tree in order, children first; returns what stands for the tree itself."""
        if isinstance(tree, str):
            return name(tree)
        phrasing, children = tree
        slots = [self.unfold(child, steps, name, reference, first) for child in children]
        steps.append(phrasing.question.format(*slots))
        return reference.format(first + len(steps) - 1)


@pytest.mark.parametrize("split", ["train", "dev"])
def test_a_composed_question_has_exactly_one_reading_and_it_is_the_plan(split):
    size = 600
    rng = random.Random(f"reader/{split}")
    facts = make_world(rng, split, size // 2)
    types: dict[str, set[str]] = {}
    for entity in facts.entities:
        types.setdefault(entity.name, set()).add(entity.type)
    reader = _Reader(types)
    for record in QuestionMaker(facts, rng, 1, full_contexts=False).records(size):
        gold = [node["question"] for node in record["question_decomposition"]]
        assert reader.plans(record["question"]) == [gold], record["question"]


def test_the_synthesiser_words_nodes_as_the_world_does(tmp_path):
    """`Wording` with the world's templates rebuilds the plain composed question from the source graph."""
    path = tmp_path / "dev.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in records("dev")), encoding="utf-8")
    graphs, _ = load_graphs([path])
    wording = Wording(node_templates())
    plain = 0
    for graph in graphs:
        for node in graph.nodes:
            found = wording.match(node.text)
            assert found is not None
            template, subjects = found
            assert template.question.format(*subjects) == node.text
            assert all(re.fullmatch(r"#\d", s) or "?" not in s for s in subjects)
        worded = wording.question(graph, graph.final, {})
        assert worded.fallbacks == 0
        plain += worded.text == graph.question
    assert plain > 0.6 * len(graphs)


# The frames that the synthesiser puts around a carrier's question, as patterns.
_FRAMES = [re.escape(frame).replace(r"\{aux\}", "(.+?)").replace(r"\{q\}", "(.+)") for frame in CARRIERS]


def test_every_turn_of_a_dialogue_has_exactly_one_reading_given_the_traces_before_it(small_world):
    """The plan of a follow-up is derivable: "that city" is the last city before the turn, the rest it says."""
    types: dict[str, set[str]] = {}
    for split in ("train", "dev"):
        facts = make_world(
            world._generator(42, split, "facts"), split, (400 if split == "train" else 120) // 2
        )
        for entity in facts.entities:
            types.setdefault(entity.name, set()).add(entity.type)
    for kind in {relation.object for relation in RELATIONS}:
        types[f"that {kind}"] = {kind}
    reader = _Reader(types)
    operators: Counter[str] = Counter()
    for name in ("short/train", "short/dev", "long/train", "long/dev"):
        for dialogue in mumu.load_dialogues(small_world / f"{name}.jsonl"):
            before: list = []
            for turn in dialogue.turns:
                antecedent = {trace.type: trace.id for trace in before}

                def named(text: str, antecedent=antecedent) -> str:
                    kind = text.removeprefix("that ")
                    return f"[A{antecedent[kind]}]" if text.startswith("that ") else text

                question, steps, first = turn.question, [], len(before) + 1
                if turn.operator == "SQR_B":
                    found = next(m for c in _FRAMES if (m := re.fullmatch(c, question)))
                    ((_, tree),) = reader.noun(found[1])
                    reader.unfold(tree, steps, named, "[A{}]", first)
                    question = found[2]
                (tree,) = reader.trees(question)
                reader.unfold(tree, steps, named, "[A{}]", first)
                assert steps == [trace.sub_question for trace in turn.traces], turn.question
                operators[turn.operator] += 1
                before += turn.traces
    assert min(operators[op] for op in ("ORIG", "GS_A", "GS_C", "SQR_B", "SQR_C")) >= 10
