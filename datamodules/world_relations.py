"""All relations of the fictional world, and the same wordings as templates for the synthesiser.

In: the tables of `world_places`, `world_bodies` and `world_works`. Out: `RELATIONS`, and `node_templates()` with which
`datamodules.mumu` words the turns of a dialogue just as the world words its composed questions.
"""

from __future__ import annotations

from datamodules.mumu_relations import NodeTemplate
from datamodules.world_bodies import BODIES
from datamodules.world_places import PEOPLE, PLACES
from datamodules.world_schema import Relation
from datamodules.world_works import PAIRS, WORKS

RELATIONS: tuple[Relation, ...] = PEOPLE + PLACES + BODIES + WORKS + PAIRS


def node_templates() -> tuple[NodeTemplate, ...]:
    """One template per phrasing: sub-question, noun phrase, answer type, question of a turn."""
    return tuple(
        NodeTemplate(p.question, p.noun, relation.object, p.ask)
        for relation in RELATIONS
        for p in relation.phrasings
    )
