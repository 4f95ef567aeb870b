"""Multi-hop questions over a fictional world, in MuSiQue's record format and its six graph shapes.

In: a `World`, a number of questions. Out: records `{id, question, answer, answer_aliases, answerable, paragraphs,
question_decomposition}` (mumu-qa 4.1). A composed question is the last sub-question with every reference replaced by
the noun phrase of the sub-question it refers to, in one of a few frames; wording and plan determine each other.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from datamodules.mumu_text import phrase
from datamodules.world_facts import Entity, Fact, World
from datamodules.world_schema import Phrasing

# shape -> references of each node (0-based), and how often the shape is drawn. MuSiQue dev: 52, 24, 8, 10, 3, 4 %.
SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "2hop": ((), (0,)),
    "3hop1": ((), (0,), (1,)),
    "3hop2": ((), (), (0, 1)),
    "4hop1": ((), (0,), (1,), (2,)),
    "4hop2": ((), (), (0, 1), (2,)),
    "4hop3": ((), (0,), (), (1, 2)),
}
_SHAPE_WEIGHTS = {"2hop": 40, "3hop1": 22, "3hop2": 12, "4hop1": 12, "4hop2": 7, "4hop3": 7}
_LEADS = ("Consider {0}. {1}", "Take {0}: {2}", "Think of {0}. {1}", "Starting from {0}, {2}")
_OPENERS = ("Tell me, {0}", "I would like to know: {0}", "Please find out: {0}")
CONTEXT_PARAGRAPHS = 20


@dataclass(frozen=True)
class Hop:
    """One node of a question graph: a fact, the wording of its sub-question, the nodes it refers to."""

    fact: Fact
    phrasing: Phrasing
    refs: tuple[int, ...]

    def subjects(self) -> list[str]:
        return [s.name for s in self.fact.subjects]

    def sub_question(self) -> str:
        """The sub-question with references "#k" (1-based)."""
        return self.phrasing.question.format(*([f"#{r + 1}" for r in self.refs] or self.subjects()))


def lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def noun_phrase(hops: list[Hop], i: int) -> str:
    """The noun phrase of node i with all references filled by noun phrases."""
    hop = hops[i]
    return hop.phrasing.noun.format(*([noun_phrase(hops, r) for r in hop.refs] or hop.subjects()))


def compose_plain(hops: list[Hop]) -> str:
    """The last sub-question as a user asks it, references replaced by noun phrases."""
    return hops[-1].phrasing.ask.format(*[noun_phrase(hops, r) for r in hops[-1].refs])


def reads_well(question: str) -> bool:
    """No doubled word, no four words in a row twice, at most 60 words and 320 characters (mumu-qa 4.6, R5 and R6)."""
    words = re.findall(r"\w+", question.lower())
    fours = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    doubled = any(a == b for a, b in pairwise(words))
    return not doubled and len(set(fours)) == len(fours) and len(words) <= 60 and len(question) <= 320


def compose(hops: list[Hop], rng: random.Random) -> str:
    """The composed question: plain, with an opener, or with a lead that names the last bridge first."""
    last = hops[-1]
    draw = rng.random()
    if len(last.refs) == 1 and draw < 0.2:
        bridge = last.refs[0]
        asked = last.phrasing.ask.format(phrase(hops[bridge].fact.object.type))
        return rng.choice(_LEADS).format(noun_phrase(hops, bridge), asked, lower_first(asked))
    question = compose_plain(hops)
    if draw > 0.9:
        return rng.choice(_OPENERS).format(lower_first(question))
    return question


class QuestionMaker:
    """Draws question graphs without effective duplicates (mumu-qa 4.3) and renders them as records.

    Args:
        world: the world of one split.
        rng: the only source of randomness.
        sids: (fact, phrasing) -> single-hop id; shared by everything made from one world.
        first_sid: the first id this maker hands out.
        full_contexts: 20 paragraphs a record, else the supporting ones only.
    """

    def __init__(self, world: World, rng: random.Random, first_sid: int, full_contexts: bool = True):
        self._world = world
        self._rng = rng
        self._sids: dict[tuple[int, str], int] = {}
        self._first_sid = first_sid
        self._full_contexts = full_contexts
        self._seen: set[object] = set()
        self._bridges: dict[str, list[Entity]] = {}
        for entity in world.entities:
            if entity.id in world.incoming and entity.id in world.outgoing:
                self._bridges.setdefault(entity.type, []).append(entity)
        self._bridge_types = sorted(self._bridges)
        pairs: dict[str, list[Fact]] = {}
        for fact in world.pairs:
            pairs.setdefault(fact.relation.name, []).append(fact)
        self._pairs = [pairs[name] for name in sorted(pairs)]
        self._by_type: dict[str, list[int]] = {}
        self._mentions: dict[int, list[int]] = {}
        for index, paragraph in enumerate(world.paragraphs):
            self._by_type.setdefault(paragraph.subject.type, []).append(index)
        for fact in world.facts:
            for entity in (fact.object, *fact.subjects[1:]):
                self._mentions.setdefault(entity.id, []).append(fact.paragraph)

    def records(self, count: int) -> Iterator[dict]:
        """Yield `count` records. ValueError when the world is too small to give that many."""
        shapes, weights = list(_SHAPE_WEIGHTS), list(_SHAPE_WEIGHTS.values())
        misses = 0
        made = 0
        while made < count:
            shape = self._rng.choices(shapes, weights)[0]
            hops = self._draw(shape)
            if hops is None or not self._is_new(hops):
                misses += 1
                if misses > 500 * count + 10_000:
                    raise ValueError(
                        f"the world is too small: only {made} of {count} distinct questions found; "
                        "ask for fewer questions or a larger world"
                    )
                continue
            made += 1
            yield self._record(shape, hops)

    # -- graphs ---------------------------------------------------------------------------------------

    def _pick(self, facts: list[Fact], arity: int | None = 1) -> Fact | None:
        """One fact, relations first so that frequent relations do not crowd out the others."""
        by_relation: dict[str, list[Fact]] = {}
        for fact in facts:
            if arity is None or fact.relation.arity == arity:
                by_relation.setdefault(fact.relation.name, []).append(fact)
        if not by_relation:
            return None
        return self._rng.choice(by_relation[self._rng.choice(list(by_relation))])

    def _into(self, entity: Entity) -> Fact | None:
        return self._pick(self._world.incoming.get(entity.id, []))

    def _out_of(self, entity: Entity) -> Fact | None:
        return self._pick(self._world.outgoing.get(entity.id, []))

    def _draw(self, shape: str) -> list[Hop] | None:
        if shape in ("2hop", "3hop1", "4hop1"):
            bridge = self._rng.choice(self._bridges[self._rng.choice(self._bridge_types)])
            facts = [self._into(bridge)]
            for _ in range(len(SHAPES[shape]) - 1):
                facts.append(self._out_of(facts[-1].object) if facts[-1] else None)
        else:
            pair = self._rng.choice(self._rng.choice(self._pairs))
            left, right = (self._into(subject) for subject in pair.subjects)
            if shape == "3hop2":
                facts = [left, right, pair]
            elif shape == "4hop2":
                facts = [left, right, pair, self._out_of(pair.object)]
            else:
                facts = [self._into(left.subjects[0]) if left else None, left, right, pair]
        found = [fact for fact in facts if fact is not None]
        return self._phrase(shape, found) if len(found) == len(facts) else None

    def _phrase(self, shape: str, facts: list[Fact]) -> list[Hop] | None:
        """Choose wordings; None when an entity or paragraph occurs twice in the graph."""
        entities = [fact.object.name for fact in facts]
        hops: list[Hop] = []
        for fact, refs in zip(facts, SHAPES[shape], strict=True):
            if not refs:
                entities.extend(s.name for s in fact.subjects)
            phrasings = fact.relation.phrasings
            hops.append(Hop(fact, self._rng.choices(phrasings, [p.weight for p in phrasings])[0], refs))
        if len(set(entities)) < len(entities) or len({fact.paragraph for fact in facts}) < len(facts):
            return None
        return hops if reads_well(compose_plain(hops)) else None

    def _sid(self, hop: Hop) -> int:
        return self._sids.setdefault((hop.fact.id, hop.phrasing.question), self._first_sid + len(self._sids))

    def _is_new(self, hops: list[Hop]) -> bool:
        """False for what the synthesiser would drop as a duplicate.

        That is: the same last two single hops, or the same answers and all but one single hop.
        """
        wordings = [(hop.fact.id, hop.phrasing.question) for hop in hops]
        answers = tuple(sorted(hop.fact.object.name for hop in hops))
        keys: list[object] = [tuple(wordings[-2:])]
        keys += [(answers, tuple(sorted(wordings[:i] + wordings[i + 1 :]))) for i in range(len(wordings))]
        if any(key in self._seen for key in keys):
            return False
        self._seen.update(keys)
        return True

    # -- records --------------------------------------------------------------------------------------

    def _record(self, shape: str, hops: list[Hop]) -> dict:
        supports = [hop.fact.paragraph for hop in hops]
        context = self._context(hops, supports)
        self._rng.shuffle(context)
        sids = [self._sid(hop) for hop in hops]
        answer = hops[-1].fact.object
        texts = [self._world.paragraphs[p].text for p in context]
        alias = self._world.aliases.get(answer.id)
        aliases = [alias] if alias and any(re.search(rf"\b{alias}\b", text) for text in texts) else []
        return {
            "id": f"{shape}__{'_'.join(map(str, sids))}",
            "question": compose(hops, self._rng),
            "answer": answer.name,
            "answer_aliases": aliases,
            "answerable": True,
            "paragraphs": [
                {
                    "idx": i,
                    "title": self._world.paragraphs[p].title,
                    "paragraph_text": self._world.paragraphs[p].text,
                    "is_supporting": p in supports,
                }
                for i, p in enumerate(context)
            ],
            "question_decomposition": [
                {
                    "id": sid,
                    "question": hop.sub_question(),
                    "answer": hop.fact.object.name,
                    "paragraph_support_idx": context.index(hop.fact.paragraph),
                }
                for sid, hop in zip(sids, hops, strict=True)
            ],
        }

    def _context(self, hops: list[Hop], supports: list[int]) -> list[int]:
        """Paragraph indexes: the supports, some that mention the same entities, some of the same kind, then any."""
        context = list(dict.fromkeys(supports))
        if not self._full_contexts:
            return context
        chosen = set(context)

        def take(pool: list[int], count: int) -> None:
            for _ in range(count):
                index = self._rng.choice(pool)
                if index not in chosen and len(context) < CONTEXT_PARAGRAPHS:
                    chosen.add(index)
                    context.append(index)

        for hop in hops:
            take(self._mentions[hop.fact.object.id], 3)
            take(self._by_type[hop.fact.subjects[0].type], 3)
        while len(context) < min(CONTEXT_PARAGRAPHS, len(self._world.paragraphs)):
            take([self._rng.randrange(len(self._world.paragraphs))], 1)
        return context
