"""Hand-written wordings: how a relation's answer is named, and which type of answer a noun asks for.

In: nothing. Out: `RELATIONS` (one `NodeTemplate` per MuSiQue `X >> relation`), `HEAD_NOUNS` (noun after what/which ->
answer type) and `HYPONYMS` (which types a vaguer reference phrase could also denote). Source: CMT-RAG appendix A
(question realisation); MuSiQue's relational sub-questions come from the T-REx zero-shot relation extraction set.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NodeTemplate:
    """One wording of a sub-question: the form it has in the source, its answer as a noun phrase, the answer's type.

    `question` is matched against a whole sub-question; `{0}`, `{1}` are its subjects, reused in `noun` and `ask`.
    `ask` is the sub-question as a user would put it; by default `question` itself, or "Who/What is {noun}?" for
    `X >> relation`.
    """

    question: str
    noun: str
    type: str
    ask: str | None = None

    def __post_init__(self) -> None:
        if "{0}" not in self.question or "{0}" not in self.noun:
            raise ValueError(f"template {self.question!r}: both 'question' and 'noun' need the slot {{0}}")


def _table(text: str) -> tuple[NodeTemplate, ...]:
    rows = (line.split("|") for line in text.strip().splitlines())
    return tuple(
        NodeTemplate(f"{{0}} >> {rel.strip()}", noun.strip(), kind.strip()) for rel, noun, kind in rows
    )


RELATIONS: tuple[NodeTemplate, ...] = _table("""
located in the administrative territorial entity | the administrative territory where {0} is located | place
contains administrative territorial entity | the administrative territory that {0} contains | place
applies to jurisdiction | the jurisdiction that {0} applies to | place
location | the location of {0} | place
location of formation | the place where {0} was formed | place
place of birth | the birthplace of {0} | place
place of death | the place where {0} died | place
place served by transport hub | the place served by {0} | place
residence | the residence of {0} | place
work location | the place where {0} worked | place
headquarters location | the location of the headquarters of {0} | place
capital | the capital of {0} | city
capital of | the place whose capital is {0} | place
licensed to broadcast to | the place that {0} is licensed to broadcast to | place
shares border with | the place that shares a border with {0} | place
located on terrain feature | the terrain feature on which {0} is located | place
located in or next to body of water | the body of water next to {0} | place
mouth of the watercourse | the body of water that {0} flows into | place
continent | the continent of {0} | continent
country | the country of {0} | country
country of citizenship | the country of citizenship of {0} | country
country of origin | the country of origin of {0} | country
crosses | the thing that {0} crosses | entity
spouse | the spouse of {0} | person
child | the child of {0} | person
father | the father of {0} | person
mother | the mother of {0} | person
sibling | the sibling of {0} | person
performer | the performer of {0} | person
composer | the composer of {0} | person
lyrics by | the lyricist of {0} | person
producer | the producer of {0} | person
director | the director of {0} | person
screenwriter | the screenwriter of {0} | person
author | the author of {0} | person
creator | the creator of {0} | person
cast member | the cast member of {0} | person
founded by | the founder of {0} | person
participant | the participant in {0} | entity
participant in | the event that {0} took part in | event
conflict | the conflict that {0} took part in | conflict
winner | the winner of {0} | entity
drafted by | the team that drafted {0} | team
member of sports team | the sports team of {0} | team
league | the league of {0} | league
sport | the sport of {0} | sport
member of | the group that {0} is a member of | organization
member of political party | the political party of {0} | party
military branch | the military branch of {0} | organization
employer | the employer of {0} | organization
educated at | the school that educated {0} | school
record label | the record label of {0} | company
manufacturer | the manufacturer of {0} | company
developer | the developer of {0} | company
publisher | the publisher of {0} | company
production company | the production company of {0} | company
distributed by | the distributor of {0} | company
operator | the operator of {0} | organization
original broadcaster | the original broadcaster of {0} | company
owned by | the owner of {0} | entity
occupant | the occupant of {0} | entity
award received | the award received by {0} | award
religion | the religion of {0} | religion
movement | the movement of {0} | movement
native language | the native language of {0} | language
languages spoken, written or signed | the language of {0} | language
original language of film or TV show | the original language of {0} | language
instrument | the instrument played by {0} | instrument
field of work | the field of work of {0} | field
position held | the position held by {0} | position
notable work | the notable work of {0} | entity
part of | the whole that {0} is part of | entity
part of the series | the series that {0} is part of | series
present in work | the work in which {0} appears | entity
has part | the part of {0} | entity
instance of | the kind of thing that {0} is | entity
based on | the work that {0} is based on | entity
named after | the namesake of {0} | entity
follows | the thing that {0} follows | entity
followed by | the thing that follows {0} | entity
family | the family of {0} | family
parent taxon | the parent taxon of {0} | entity
""")

# Noun after what/which (or in "what is the name of the ...") -> type, which is also the word of "that ...".
HEAD_NOUNS: dict[str, str] = {
    **dict.fromkeys(
        ("person", "man", "woman", "actor", "actress", "singer", "king", "queen", "president"), "person"
    ),
    **dict.fromkeys(
        ("author", "player", "politician", "emperor", "general", "chancellor", "leader"), "person"
    ),
    **dict.fromkeys(("city", "town", "village", "capital"), "city"),
    **dict.fromkeys(
        ("county", "country", "state", "river", "region", "province", "district", "continent"), "="
    ),
    **dict.fromkeys(("island", "ocean", "sea", "lake", "mountain", "airport", "stadium", "building"), "="),
    **dict.fromkeys(
        ("team", "league", "album", "film", "song", "book", "language", "religion", "award"), "="
    ),
    **dict.fromkeys(
        ("war", "treaty", "ship", "empire", "dynasty", "party", "school", "series", "instrument"), "="
    ),
    **dict.fromkeys(("organization", "company", "movement", "position", "event", "conflict", "family"), "="),
    **dict.fromkeys(("nation",), "country"),
    **dict.fromkeys(("area", "place", "location", "birthplace", "territory"), "place"),
    **dict.fromkeys(("movie",), "film"),
    **dict.fromkeys(("novel",), "book"),
    **dict.fromkeys(("label", "firm", "manufacturer", "network", "publisher", "broadcaster"), "company"),
    **dict.fromkeys(("organisation", "group", "agency", "institution"), "organization"),
    **dict.fromkeys(("university", "college"), "school"),
    **dict.fromkeys(("battle",), "conflict"),
    **dict.fromkeys(("club",), "team"),
}
HEAD_NOUNS = {noun: noun if kind == "=" else kind for noun, kind in HEAD_NOUNS.items()}


def _names(text: str) -> frozenset[str]:
    return frozenset(name.strip() for name in text.replace("\n", " ").split(","))


# Answers whose type is known whatever the sub-question says (SQuAD-normalised).
COUNTRIES = _names(
    """afghanistan, albania, algeria, angola, argentina, armenia, australia, austria, azerbaijan, bangladesh,
    belarus, belgium, bolivia, brazil, bulgaria, burma, cambodia, cameroon, canada, chile, china, colombia,
    croatia, cuba, cyprus, czech republic, denmark, east timor, ecuador, egypt, england, estonia, ethiopia,
    finland, france, germany, ghana, greece, guatemala, haiti, hungary, iceland, india, indonesia, iran, iraq,
    ireland, israel, italy, jamaica, japan, kazakhstan, kenya, kosovo, kuwait, laos, latvia, libya, lithuania,
    malaysia, mexico, mongolia, morocco, myanmar, namibia, nepal, netherlands, new zealand, nicaragua,
    nigeria, north korea, norway, pakistan, panama, paraguay, peoples republic of china, peru, philippines,
    poland, portugal, qatar, romania, russia, russian federation, saudi arabia, scotland, senegal, serbia,
    singapore, slovakia, slovenia, somalia, south africa, south korea, soviet union, spain, sri lanka, sudan,
    sweden, switzerland, syria, taiwan, thailand, tunisia, turkey, uganda, ukraine, united arab emirates,
    united kingdom, united states, united states of america, uruguay, us, usa, uzbekistan, venezuela, vietnam,
    wales, zambia, zimbabwe"""
)
STATES = _names(
    """alabama, alaska, arizona, arkansas, california, colorado, connecticut, delaware, florida, hawaii, idaho,
    illinois, indiana, iowa, kansas, kentucky, louisiana, maine, maryland, massachusetts, michigan, minnesota,
    mississippi, missouri, montana, nebraska, nevada, new hampshire, new jersey, new mexico, north carolina,
    north dakota, ohio, oklahoma, oregon, pennsylvania, rhode island, south carolina, south dakota, tennessee,
    texas, utah, vermont, virginia, west virginia, wisconsin, wyoming, queensland, new south wales, tasmania,
    kerala, tamil nadu, bavaria, saxony"""
)

_PLACES = (
    "city",
    "county",
    "country",
    "state",
    "region",
    "province",
    "district",
    "continent",
    "island",
    "river",
)
_WATERS = ("ocean", "sea", "lake", "mountain", "airport", "stadium", "building", "empire")
_GROUPS = ("company", "team", "school", "party", "league", "organization", "movement", "family")
# A phrase "that <type>" could also be read as naming an answer of these types.
HYPONYMS: dict[str, frozenset[str]] = {
    "place": frozenset(_PLACES + _WATERS),
    "region": frozenset(("place", "county", "state", "province", "district")),
    "organization": frozenset(_GROUPS),
    "event": frozenset(("conflict", "war")),
    "conflict": frozenset(("war",)),
    "time": frozenset(("year",)),
    **{kind: frozenset(("place",)) for kind in (*_PLACES, *_WATERS) if kind != "region"},
    **{kind: frozenset(("organization",)) for kind in _GROUPS if kind != "organization"},
}


def could_denote(phrase_type: str, other_type: str) -> bool:
    """Whether "that <phrase_type>" might be taken for an answer of `other_type`."""
    return phrase_type == other_type or other_type in HYPONYMS.get(phrase_type, ())
