"""What the tests of the fictional world share: its records and wordings."""

from functools import cache

from datamodules import world
from datamodules.world_relations import RELATIONS

PHRASINGS = [(relation, phrasing) for relation in RELATIONS for phrasing in relation.phrasings]


@cache
def records(split: str, seed: int = 42, count: int = 600, paragraphs: bool = True) -> tuple[dict, ...]:
    return tuple(world.world_records(split, seed, count, paragraphs))
