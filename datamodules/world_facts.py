"""The fictional world of one split: entities, functional facts about them, and the encyclopedia that states the facts.

In: a seed, a split and a size. Out: a `World` whose every fact stands in exactly one paragraph of 2-4 sentences titled
with the fact's first subject, as MuSiQue's supporting paragraphs do.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from datamodules.world_names import Names
from datamodules.world_relations import RELATIONS
from datamodules.world_schema import LITERAL_TYPES, Relation

# Entities of each type per thousand.
_SHARES = {
    "person": 300, "city": 110, "region": 45, "country": 35, "river": 45, "mountain": 25, "lake": 25,
    "company": 70, "label": 30, "university": 40, "band": 60, "film": 60, "book": 60, "song": 50,
    "organization": 45, "award": 35, "team": 40, "treaty": 15, "railway": 15, "currency": 5,
}  # fmt: skip

# How a paragraph introduces an entity, how it goes on about it, and what it says when there is little to say.
_KINDS = {
    "person": ("writer", "painter", "merchant", "musician", "athlete", "physician", "actor", "engineer"),
    "city": ("port city", "market town", "mining town", "university town"),
    "region": ("rural region", "mountainous region", "coastal region"),
    "country": ("small country", "island nation", "landlocked country"),
    "river": ("river", "slow river", "navigable river"),
    "mountain": ("mountain", "snow-capped mountain"),
    "lake": ("body of water", "shallow body of water"),
    "company": ("company", "family business", "listed company"),
    "label": ("record label", "independent record label"),
    "university": ("public university", "private university"),
    "band": ("rock band", "folk band", "jazz group"),
    "film": ("drama film", "comedy film", "silent film"),
    "book": ("novel", "travelogue", "historical novel"),
    "song": ("ballad", "folk song", "popular song"),
    "organization": ("learned society", "charity", "trade association"),
    "award": ("literary award", "scientific award", "award for bravery"),
    "team": ("football club", "hockey club", "rowing club"),
    "treaty": ("peace treaty", "trade agreement"),
    "railway": ("railway line", "narrow-gauge railway"),
    "currency": ("currency",),
}
_FILLERS = {
    "person": ("{p} kept a diary for most of a long life.", "{p} was known for a dry sense of humour."),
    "city": ("The city has a covered market and an old harbour wall.", "The city holds a fair every autumn."),
    "region": ("The region is known for its orchards.", "The region has few roads and long winters."),
    "country": ("The country exports timber and salt.", "The country has two official languages."),
    "river": ("The river freezes in hard winters.", "The river once drove many water mills."),
    "mountain": ("The mountain is often hidden by clouds.", "A hut on its slope serves hikers."),
    "lake": ("Its shores are a nesting place for herons.", "Its water turns green in summer."),
    "company": ("The company survived two fires.", "The company publishes a yearly report."),
    "label": ("The label is known for its plain sleeves.", "The label presses its records by itself."),
    "university": ("The university keeps a botanical garden.", "The university has a large library."),
    "band": ("The band tours every summer.", "The band has changed its style twice."),
    "film": ("The film was restored many years later.", "The film was a modest success."),
    "book": ("The book has remained in print.", "The book was first read by a small circle."),
    "song": ("The song has been covered many times.", "The song is often heard at weddings."),
    "organization": ("The organization meets twice a year.", "The organization edits a bulletin."),
    "award": ("The award comes with a small sum of money.", "The award is decided by a jury of seven."),
    "team": ("The club wears green and white.", "The club has a youth section."),
    "treaty": ("The text has nine articles.", "The treaty was kept secret for a month."),
    "railway": ("The line crosses eleven bridges.", "The line carries freight and passengers."),
    "currency": ("Its coins are made of brass.", "Its notes show birds."),
}
_PRONOUNS = {"person": ("He", "She"), "band": ("The band",), "company": ("The company", "It")}


# Plausible numbers by relation.
_RANGES = {
    "population": (2_000, 9_000_000), "area": (300, 900_000), "length": (40, 2_900), "height": (700, 8_000),
    "employees": (20, 90_000), "members": (50, 40_000), "distance": (20, 1_900),
}  # fmt: skip


@dataclass(frozen=True)
class Entity:
    """Something with a name; literals (years, dates, numbers) are entities of their type."""

    id: int
    type: str
    name: str


@dataclass
class Fact:
    """relation(subjects) = object; `paragraph` is the index of the paragraph that states it."""

    id: int
    relation: Relation
    subjects: tuple[Entity, ...]
    object: Entity
    paragraph: int = -1


@dataclass(frozen=True)
class Paragraph:
    title: str
    text: str
    subject: Entity


@dataclass
class World:
    """Entities, facts and paragraphs of one split, with the two indexes that question building walks.

    incoming: entity id -> facts whose object it is; outgoing: entity id -> one-subject facts about it.
    """

    entities: list[Entity] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)
    pairs: list[Fact] = field(default_factory=list)
    paragraphs: list[Paragraph] = field(default_factory=list)
    incoming: dict[int, list[Fact]] = field(default_factory=dict)
    outgoing: dict[int, list[Fact]] = field(default_factory=dict)
    aliases: dict[int, str] = field(default_factory=dict)


def reserved_words() -> frozenset[str]:
    """Lower-case words of all templates; no invented word may equal one of them."""
    texts = [text for r in RELATIONS for p in r.phrasings for text in (p.question, p.noun)]
    texts += [statement for r in RELATIONS for statement in r.statements]
    texts += [text for pool in (_KINDS, _FILLERS) for options in pool.values() for text in options]
    return frozenset(re.findall(r"[a-z]+", " ".join(texts).lower()))


def make_world(rng: random.Random, split: str, size: int) -> World:
    """Draw a world of about `size` named entities (at least a few of each type)."""
    names = Names(rng, split, reserved_words())
    world = World()
    by_type: dict[str, list[Entity]] = {}

    def new_entity(kind: str, name: str) -> Entity:
        entity = Entity(len(world.entities), kind, name)
        world.entities.append(entity)
        return entity

    for kind, share in _SHARES.items():
        count = max(6, size * share // 1000)
        by_type[kind] = [new_entity(kind, names.name(kind)) for _ in range(count)]
    years: dict[str, Entity] = {}

    def literal(relation: Relation) -> Entity:
        kind = relation.object
        if kind == "year":
            text = names.year()
            if text not in years:
                years[text] = new_entity("year", text)
            return years[text]
        return new_entity(kind, names.date() if kind == "time" else names.quantity(*_RANGES[relation.name]))

    def draw_object(relation: Relation, subjects: tuple[Entity, ...]) -> Entity:
        if relation.object in LITERAL_TYPES:
            return literal(relation)
        while True:
            candidate = rng.choice(by_type[relation.object])
            if candidate not in subjects:
                return candidate

    for relation in RELATIONS:
        if relation.arity == 1:
            for kind in relation.subjects[0]:
                for subject in by_type[kind]:
                    if rng.random() < 0.75:
                        _add(world, relation, (subject,), draw_object(relation, (subject,)))
    _add_pairs(world, rng, by_type, draw_object, size)
    _write_paragraphs(world, rng)
    return world


def _add(world: World, relation: Relation, subjects: tuple[Entity, ...], obj: Entity) -> None:
    fact = Fact(len(world.facts), relation, subjects, obj)
    world.facts.append(fact)
    world.incoming.setdefault(obj.id, []).append(fact)
    if relation.arity == 1:
        world.outgoing.setdefault(subjects[0].id, []).append(fact)
    else:
        world.pairs.append(fact)


def _add_pairs(
    world: World,
    rng: random.Random,
    by_type: dict[str, list[Entity]],
    draw_object: Callable[[Relation, tuple[Entity, ...]], Entity],
    size: int,
) -> None:
    """Two-subject facts between entities that other facts lead to, so that both subjects can be asked for."""
    pools = {kind: [e for e in pool if e.id in world.incoming] for kind, pool in by_type.items()}
    pools["year"] = [e for e in world.entities if e.type == "year"]
    relations = [r for r in RELATIONS if r.arity == 2]
    taken: set[tuple[str, int, int]] = set()
    per_relation = max(12, size // (2 * len(relations)))
    for relation in relations:
        for _ in range(per_relation):
            first = rng.choice(pools[rng.choice(relation.subjects[0])])
            second = rng.choice(pools[rng.choice(relation.subjects[1])])
            # Symmetric readings ("between A and B") must not have two answers.
            keys = {(relation.name, first.id, second.id), (relation.name, second.id, first.id)}
            if first == second or keys & taken:
                continue
            taken |= keys
            _add(world, relation, (first, second), draw_object(relation, (first, second)))


def _write_paragraphs(world: World, rng: random.Random) -> None:
    """State every fact once: the facts of an entity in paragraphs of up to five facts and 2-4 sentences."""
    by_subject: dict[int, list[Fact]] = {}
    for fact in world.facts:
        by_subject.setdefault(fact.subjects[0].id, []).append(fact)
    for entity in world.entities:
        facts = by_subject.get(entity.id, [])
        rng.shuffle(facts)
        start = 0
        while start < len(facts):
            chunk = facts[start : start + rng.randint(3, 5)]
            text = _paragraph_text(world, entity, chunk, rng, first=start == 0)
            for fact in chunk:
                fact.paragraph = len(world.paragraphs)
            world.paragraphs.append(Paragraph(entity.name, text, entity))
            start += len(chunk)


def _paragraph_text(world: World, entity: Entity, facts: list[Fact], rng: random.Random, first: bool) -> str:
    statements = []
    for fact in facts:
        template = rng.choice(fact.relation.statements)
        second = fact.subjects[1].name if len(fact.subjects) == 2 else ""
        statements.append(template.format("", second, o=fact.object.name))
    kind = rng.choice(_KINDS.get(entity.type, ("subject",)))
    family = entity.name.split()[-1]
    pronouns = _PRONOUNS.get(entity.type, ("It",))
    pronoun = pronouns[entity.id % len(pronouns)]
    if entity.type == "person" and first:
        if rng.random() < 0.5:
            pronoun = family
            world.aliases[entity.id] = family
    sentences = []
    if first:
        article = "an" if kind[0] in "aeio" else "a"
        joined = "who" if entity.type == "person" else "that"
        sentences.append(f"{entity.name} is {article} {kind} {joined} {statements.pop(0)}.")
    else:
        sentences.append(f"{entity.name} {statements.pop(0)}.")
    while statements:
        if len(statements) >= 2 and (rng.random() < 0.5 or len(statements) > 4 - len(sentences)):
            sentences.append(f"{pronoun} {statements.pop(0)} and {statements.pop(0)}.")
        else:
            sentences.append(f"{pronoun} {statements.pop(0)}.")
    if len(sentences) < 2 or (len(sentences) < 4 and rng.random() < 0.3):
        sentences.append(rng.choice(_FILLERS[entity.type]).format(p=pronoun))
    return " ".join(sentences)
