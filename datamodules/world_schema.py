"""What a relation of the fictional world is: who can relate to what, and how it is asked, named and stated.

Each relation carries several `Phrasing`s and the statements that express it in an encyclopedia paragraph. A phrasing
pairs the wording of a sub-question with ONE noun phrase for its answer:

    "Who founded {0}?"             <->  "the person who founded {0}"
    "{0} >> headquarters location" <->  "the headquarters location of {0}"

No two phrasings share a question or a noun phrase, so a composed question determines the wording of every
sub-question (mumu-qa 4.6: the noun phrase of a node identifies the node). Slots {0}, {1} are the subjects in the order
of their references.
"""

from __future__ import annotations

from dataclasses import dataclass

LITERAL_TYPES = ("year", "time", "quantity")


@dataclass(frozen=True)
class Phrasing:
    """One wording: `question` (a sub-question), `noun` (its answer as a noun phrase), `ask` (a turn's question)."""

    question: str
    noun: str
    ask: str
    weight: int


@dataclass(frozen=True)
class Relation:
    """A functional relation from one or two subjects to an object.

    subjects: the allowed types of each subject; object: type of the answer; statements: verb phrases whose grammatical
    subject is the first subject, with slots {o} (the object) and, for two subjects, {1}.
    """

    name: str
    subjects: tuple[tuple[str, ...], ...]
    object: str
    phrasings: tuple[Phrasing, ...]
    statements: tuple[str, ...]

    @property
    def arity(self) -> int:
        return len(self.subjects)


def relation(
    name: str, subjects: str, obj: str, phrasings: tuple[tuple[str, str], ...], statements: tuple[str, ...]
) -> Relation:
    """`subjects`: types separated by blanks, the two subjects of a pair relation separated by '+'."""
    made = []
    for question, noun in phrasings:
        relational = " >> " in question
        ask = f"{'Who' if obj == 'person' else 'What'} is {noun}?" if relational else question
        made.append(Phrasing(question, noun, ask, 1 if relational else 2))
    slots = tuple(tuple(part.split()) for part in subjects.split("+"))
    return Relation(name, slots, obj, tuple(made), statements)
