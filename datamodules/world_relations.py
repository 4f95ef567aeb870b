"""The relations of the fictional world: who can relate to what, and how it is asked, named and stated.

In: nothing. Out: `RELATIONS`, a tuple of `Relation`. Each relation carries several `Phrasing`s and the statements
that express it in an encyclopedia paragraph. A phrasing pairs the wording of a sub-question with ONE noun phrase for
its answer:

    "Who founded {0}?"             <->  "the person who founded {0}"
    "{0} >> headquarters location" <->  "the headquarters location of {0}"

No two phrasings share a question or a noun phrase, so a composed question determines the wording of every
sub-question (mumu-qa 4.6: the noun phrase of a node identifies the node). Slots {0}, {1} are the subjects in the order
of their references.
"""

from __future__ import annotations

from dataclasses import dataclass

LITERAL_TYPES = ("year", "date", "number")

# How a later turn refers to an answer of the type.
PHRASES = {
    "person": "that person",
    "city": "that city",
    "region": "that region",
    "country": "that country",
    "river": "that river",
    "mountain": "that mountain",
    "lake": "that lake",
    "company": "that company",
    "label": "that label",
    "university": "that university",
    "band": "that band",
    "film": "that film",
    "book": "that book",
    "song": "that song",
    "organization": "that organization",
    "award": "that award",
    "team": "that team",
    "treaty": "that treaty",
    "railway": "that railway",
    "currency": "that currency",
    "year": "that year",
    "date": "that date",
    "number": "that number",
}


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


def _relation(
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


_PEOPLE = (
    _relation(
        "birthplace", "person", "city",
        (("Where was {0} born?", "the place where {0} was born"),
         ("In which city was {0} born?", "the city in which {0} was born"),
         ("What is the birthplace of {0}?", "the birthplace of {0}"),
         ("{0} >> place of birth", "the place of birth of {0}")),
        ("was born in {o}", "comes from {o}"),
    ),
    _relation(
        "birth date", "person", "date",
        (("When was {0} born?", "the day when {0} was born"),
         ("On what date was {0} born?", "the date on which {0} was born"),
         ("{0} >> date of birth", "the date of birth of {0}")),
        ("was born on {o}", "celebrated every birthday on the anniversary of {o}"),
    ),
    _relation(
        "deathplace", "person", "city",
        (("Where did {0} die?", "the place where {0} died"),
         ("In which city did {0} pass away?", "the city in which {0} passed away"),
         ("{0} >> place of death", "the place of death of {0}")),
        ("died in {o}", "spent a last winter in {o} and died there"),
    ),
    _relation(
        "residence", "person", "city",
        (("Where did {0} live?", "the place where {0} lived"),
         ("Which city did {0} move to?", "the city that {0} moved to"),
         ("{0} >> residence", "the residence of {0}")),
        ("moved to {o}", "lived for many years in {o}"),
    ),
    _relation(
        "education", "person", "university",
        (("Which university did {0} attend?", "the university that {0} attended"),
         ("Where did {0} study?", "the place where {0} studied"),
         ("{0} >> educated at", "the institution where {0} was educated")),
        ("studied at {o}", "graduated from {o}"),
    ),
    _relation(
        "spouse", "person", "person",
        (("Who married {0}?", "the person who married {0}"),
         ("Who was {0} married to?", "the person {0} was married to"),
         ("{0} >> spouse", "the spouse of {0}")),
        ("married {o}", "shared a household with {o} after their wedding"),
    ),
    _relation(
        "mother", "person", "person",
        (("Who gave birth to {0}?", "the person who gave birth to {0}"),
         ("Which woman raised {0}?", "the woman who raised {0}"),
         ("{0} >> mother", "the mother of {0}")),
        ("was the first child of {o}, a widow", "was raised by {o}, the only parent at home"),
    ),
    _relation(
        "mentor", "person", "person",
        (("Who taught {0}?", "the person who taught {0}"),
         ("Who was the mentor of {0}?", "the mentor of {0}"),
         ("{0} >> student of", "the person that {0} was a student of")),
        ("was taught by {o}", "learned the craft from {o}"),
    ),
    _relation(
        "employer", "person", "company",
        (("Which company employed {0}?", "the company that employed {0}"),
         ("Who did {0} work for?", "the company {0} worked for"),
         ("{0} >> employer", "the employer of {0}")),
        ("worked for {o}", "was employed by {o}"),
    ),
    _relation(
        "award", "person", "award",
        (("Which award did {0} receive?", "the award that {0} received"),
         ("What honour was given to {0}?", "the honour that was given to {0}"),
         ("{0} >> award received", "the award received by {0}")),
        ("received the {o}", "was honoured with the {o}"),
    ),
    _relation(
        "citizenship", "person", "country",
        (("Which country is {0} a citizen of?", "the country that {0} is a citizen of"),
         ("What is the home country of {0}?", "the home country of {0}"),
         ("{0} >> country of citizenship", "the country of citizenship of {0}")),
        ("is a citizen of {o}", "holds a passport of {o}"),
    ),
    _relation(
        "membership", "person", "organization",
        (("Which organization did {0} join?", "the organization that {0} joined"),
         ("What society did {0} belong to?", "the society that {0} belonged to"),
         ("{0} >> member of", "the body that {0} is a member of")),
        ("joined the {o}", "became a member of the {o}"),
    ),
    _relation(
        "plays for", "person", "team",
        (("Which team did {0} play for?", "the team that {0} played for"),
         ("What club signed {0}?", "the club that signed {0}"),
         ("{0} >> member of sports team", "the sports team of {0}")),
        ("played for {o}", "was signed by {o}"),
    ),
)  # fmt: skip

_PLACES = (
    _relation(
        "region", "city mountain", "region",
        (("Which region is {0} in?", "the region that {0} is in"),
         ("What province contains {0}?", "the province that contains {0}"),
         ("{0} >> located in the administrative territorial entity",
          "the administrative territorial entity of {0}")),
        ("lies in {o}", "is part of {o}"),
    ),
    _relation(
        "country", "region lake city", "country",
        (("Which country does {0} belong to?", "the country that {0} belongs to"),
         ("What nation includes {0}?", "the nation that includes {0}"),
         ("{0} >> country", "the country of {0}")),
        ("belongs to {o}", "is found in {o}"),
    ),
    _relation(
        "river at", "city", "river",
        (("Which river flows through {0}?", "the river that flows through {0}"),
         ("What is the river by {0}?", "the river by {0}"),
         ("{0} >> located next to body of water", "the body of water next to {0}")),
        ("stands on the {o}", "was built where the {o} could be forded"),
    ),
    _relation(
        "mayor", "city", "person",
        (("Who is the mayor of {0}?", "the mayor of {0}"),
         ("Who governs {0}?", "the person who governs {0}"),
         ("{0} >> head of government", "the head of government of {0}")),
        ("is governed by its mayor, {o}", "elected {o} as its mayor"),
    ),
    _relation(
        "twin", "city", "city",
        (("Which city is twinned with {0}?", "the city that is twinned with {0}"),
         ("What is the sister city of {0}?", "the sister city of {0}"),
         ("{0} >> twinned administrative body", "the twinned administrative body of {0}")),
        ("is twinned with {o}", "has {o} as its sister city"),
    ),
    _relation(
        "population", "city region country", "number",
        (("How many people live in {0}?", "the number of people who live in {0}"),
         ("What is the population of {0}?", "the population of {0}")),
        ("has a population of {o}", "counts {o} inhabitants"),
    ),
    _relation(
        "capital", "region country", "city",
        (("What is the capital of {0}?", "the capital of {0}"),
         ("Which city is the seat of government of {0}?", "the city that is the seat of government of {0}"),
         ("{0} >> capital", "the capital city of {0}")),
        ("has its capital in {o}", "is administered from {o}, its capital"),
    ),
    _relation(
        "governor", "region", "person",
        (("Who is the governor of {0}?", "the governor of {0}"),
         ("Who administers {0}?", "the person who administers {0}"),
         ("{0} >> officeholder", "the officeholder of {0}")),
        ("is administered by its governor, {o}", "has {o} as its governor"),
    ),
    _relation(
        "neighbour region", "region", "region",
        (("Which region borders {0}?", "the region that borders {0}"),
         ("What province lies next to {0}?", "the province that lies next to {0}")),
        ("borders {o}", "lies next to {o}"),
    ),
    _relation(
        "neighbour country", "country", "country",
        (("Which country borders {0}?", "the country that borders {0}"),
         ("What is the neighbour of {0}?", "the neighbour of {0}"),
         ("{0} >> shares border with", "the state that shares a border with {0}")),
        ("borders {o}", "shares its only land border with {o}"),
    ),
    _relation(
        "highest point", "region country", "mountain",
        (("Which mountain is the tallest in {0}?", "the mountain that is the tallest in {0}"),
         ("What peak rises above {0}?", "the peak that rises above {0}"),
         ("{0} >> highest point", "the highest point of {0}")),
        ("rises to its highest point at {o}", "has {o} as its tallest mountain"),
    ),
    _relation(
        "area", "region lake country", "number",
        (("How large is {0}?", "the size of {0}"),
         ("{0} >> area", "the area of {0}")),
        ("covers {o} square kilometres", "has an area of {o} square kilometres"),
    ),
    _relation(
        "president", "country", "person",
        (("Who is the president of {0}?", "the president of {0}"),
         ("Who rules {0}?", "the person who rules {0}"),
         ("{0} >> head of state", "the head of state of {0}")),
        ("is ruled by its president, {o}", "elected {o} as its president"),
    ),
    _relation(
        "largest city", "country", "city",
        (("What is the largest city in {0}?", "the largest city in {0}"),
         ("Which city has the most people in {0}?", "the city that has the most people in {0}")),
        ("has its largest city in {o}", "is dominated by {o}, its largest city"),
    ),
    _relation(
        "anthem", "country", "song",
        (("What is the national anthem of {0}?", "the national anthem of {0}"),
         ("Which song is sung on holidays in {0}?", "the song that is sung on holidays in {0}"),
         ("{0} >> anthem", "the anthem of {0}")),
        ("took {o} as its national anthem", "sings {o}, its anthem, on holidays"),
    ),
    _relation(
        "independence", "country", "year",
        (("When did {0} become independent?", "the year when {0} became independent"),
         ("In which year did {0} gain independence?", "the year in which {0} gained independence")),
        ("became independent in {o}", "gained independence in {o}"),
    ),
    _relation(
        "currency", "country", "currency",
        (("What is the currency of {0}?", "the currency of {0}"),
         ("Which money is used in {0}?", "the money that is used in {0}")),
        ("uses the {o} as its currency", "pays in the {o}, its own money"),
    ),
    _relation(
        "source", "river", "region",
        (("Where does {0} rise?", "the place where {0} rises"),
         ("Which region does {0} spring from?", "the region that {0} springs from"),
         ("{0} >> origin of the watercourse", "the origin of the watercourse of {0}")),
        ("rises in {o}", "springs from the hills of {o}"),
    ),
    _relation(
        "mouth", "river", "lake",
        (("What body of water does {0} flow into?", "the body of water that {0} flows into"),
         ("Where does {0} end?", "the place where {0} ends"),
         ("{0} >> mouth of the watercourse", "the mouth of the watercourse of {0}")),
        ("flows into {o}", "reaches its mouth at {o}"),
    ),
    _relation(
        "tributary", "river", "river",
        (("Which river does {0} join?", "the river that {0} joins"),
         ("{0} >> tributary of", "the river that {0} is a tributary of")),
        ("joins the {o}", "is a tributary of the {o}"),
    ),
    _relation(
        "length", "river", "number",
        (("How long is {0}?", "the length of {0}"),
         ("How many kilometres does {0} run?", "the number of kilometres that {0} runs")),
        ("is {o} kilometres long", "runs for {o} kilometres"),
    ),
    _relation(
        "height", "mountain", "number",
        (("How high is {0}?", "the height of {0}"),
         ("{0} >> elevation above sea level", "the elevation above sea level of {0}")),
        ("is {o} metres high", "reaches {o} metres above the sea"),
    ),
    _relation(
        "first ascent", "mountain", "person",
        (("Who first climbed {0}?", "the person who first climbed {0}"),
         ("Which climber conquered {0}?", "the climber who conquered {0}")),
        ("was first climbed by {o}", "was conquered by {o}, a lone climber"),
    ),
    _relation(
        "explorer", "lake river", "person",
        (("Who charted {0}?", "the person who charted {0}"),
         ("Which explorer mapped {0}?", "the explorer who mapped {0}"),
         ("{0} >> discoverer or inventor", "the discoverer of {0}")),
        ("was charted by {o}", "was mapped by {o}, an explorer"),
    ),
)  # fmt: skip

_BODIES = (
    _relation(
        "founder", "company label university organization team", "person",
        (("Who founded {0}?", "the person who founded {0}"),
         ("Who was the founder of {0}?", "the founder of {0}"),
         ("Who established {0}?", "the person who established {0}"),
         ("{0} >> founded by", "the person that {0} was founded by")),
        ("was founded by {o}", "was established by {o}"),
    ),
    _relation(
        "founding year", "company label university organization team city", "year",
        (("When was {0} founded?", "the year when {0} was founded"),
         ("In which year was {0} established?", "the year in which {0} was established"),
         ("{0} >> inception", "the inception of {0}")),
        ("was founded in {o}", "dates from {o}"),
    ),
    _relation(
        "headquarters", "company label university organization", "city",
        (("Where is {0} based?", "the place where {0} is based"),
         ("Which city is home to {0}?", "the city that is home to {0}"),
         ("{0} >> headquarters location", "the headquarters location of {0}")),
        ("is based in {o}", "has its headquarters in {o}"),
    ),
    _relation(
        "chief", "company label", "person",
        (("Who runs {0}?", "the person who runs {0}"),
         ("Who is the head of {0}?", "the head of {0}"),
         ("{0} >> chief executive officer", "the chief executive officer of {0}")),
        ("is run by {o}", "appointed {o} as chief executive officer"),
    ),
    _relation(
        "owner", "company label team", "company",
        (("Which company owns {0}?", "the company that owns {0}"),
         ("What firm bought {0}?", "the firm that bought {0}"),
         ("{0} >> owned by", "the company that {0} is owned by")),
        ("is owned by {o}", "was bought by {o}"),
    ),
    _relation(
        "employees", "company university", "number",
        (("How many people work at {0}?", "the number of people who work at {0}"),
         ("{0} >> employees", "the employee count of {0}")),
        ("employs {o} people", "has a staff of {o}"),
    ),
    _relation(
        "first signing", "label", "band",
        (("Which band was the first to sign with {0}?", "the band that was the first to sign with {0}"),
         ("What group opened the catalogue of {0}?", "the group that opened the catalogue of {0}")),
        ("signed {o} as its first band", "opened its catalogue with {o}"),
    ),
    _relation(
        "rector", "university", "person",
        (("Who is the rector of {0}?", "the rector of {0}"),
         ("Who heads {0}?", "the person who heads {0}"),
         ("{0} >> president of the institution", "the president of the institution {0}")),
        ("is headed by its rector, {o}", "chose {o} as its rector"),
    ),
    _relation(
        "namesake", "award university mountain", "person",
        (("Who is {0} named after?", "the person {0} is named after"),
         ("Whose name does {0} bear?", "the person whose name {0} bears"),
         ("{0} >> named after", "the namesake of {0}")),
        ("is named after {o}", "bears the name of {o} on its seal"),
    ),
    _relation(
        "chair", "organization", "person",
        (("Who chairs {0}?", "the person who chairs {0}"),
         ("Who presides over {0}?", "the person who presides over {0}"),
         ("{0} >> chairperson", "the chairperson of {0}")),
        ("is chaired by {o}", "elected {o} as its chairperson"),
    ),
    _relation(
        "parent organization", "organization", "organization",
        (("Which organization is {0} part of?", "the organization that {0} is part of"),
         ("{0} >> parent organization", "the parent organization of {0}")),
        ("is part of the {o}", "has the {o} as its parent organization"),
    ),
    _relation(
        "members", "organization", "number",
        (("How many members does {0} have?", "the number of members that {0} has"),
         ("{0} >> member count", "the member count of {0}")),
        ("has {o} members", "counts {o} members"),
    ),
    _relation(
        "presenter", "award", "organization",
        (("Which organization presents {0}?", "the organization that presents {0}"),
         ("{0} >> conferred by", "the organization that {0} is conferred by")),
        ("is presented by the {o}", "is conferred each spring by the {o}"),
    ),
    _relation(
        "first winner", "award", "person",
        (("Who was the first winner of {0}?", "the first winner of {0}"),
         ("Who received the earliest {0}?", "the person who received the earliest {0}"),
         ("{0} >> winner", "the winner of {0}")),
        ("had {o} as its first winner", "went to {o} when it was first given"),
    ),
    _relation(
        "ceremony", "award", "city",
        (("Where is {0} presented?", "the place where {0} is presented"),
         ("Which city hosts the ceremony of {0}?", "the city that hosts the ceremony of {0}")),
        ("is presented in {o}", "is handed over at a ceremony in {o}"),
    ),
    _relation(
        "home city", "team", "city",
        (("Where does {0} play?", "the place where {0} plays"),
         ("Which city does {0} represent?", "the city that {0} represents"),
         ("{0} >> home venue", "the home venue of {0}")),
        ("plays in {o}", "represents {o}"),
    ),
    _relation(
        "coach", "team", "person",
        (("Who coaches {0}?", "the person who coaches {0}"),
         ("Who is the trainer of {0}?", "the trainer of {0}"),
         ("{0} >> head coach", "the head coach of {0}")),
        ("is coached by {o}", "hired {o} as its coach"),
    ),
    _relation(
        "captain", "team", "person",
        (("Who captains {0}?", "the person who captains {0}"),
         ("Who is the captain of {0}?", "the captain of {0}")),
        ("is captained by {o}", "made {o} its captain"),
    ),
    _relation(
        "mediator", "treaty", "person",
        (("Who mediated {0}?", "the person who mediated {0}"),
         ("Who drafted the text of {0}?", "the person who drafted the text of {0}")),
        ("was mediated by {o}", "was drafted by {o}"),
    ),
    _relation(
        "signing place", "treaty", "city",
        (("Where was {0} signed?", "the place where {0} was signed"),
         ("Which city hosted the signing of {0}?", "the city that hosted the signing of {0}")),
        ("was signed in {o}", "was concluded in {o}"),
    ),
    _relation(
        "signing year", "treaty", "year",
        (("When was {0} signed?", "the year when {0} was signed"),
         ("In which year did {0} take effect?", "the year in which {0} took effect")),
        ("took effect in {o}", "dates from {o}"),
    ),
    _relation(
        "builder", "railway", "company",
        (("Which company built {0}?", "the company that built {0}"),
         ("What firm operates {0}?", "the firm that operates {0}")),
        ("was built by {o}", "is operated by {o}, which built it"),
    ),
    _relation(
        "engineer", "railway", "person",
        (("Who designed {0}?", "the person who designed {0}"),
         ("Which engineer planned {0}?", "the engineer who planned {0}")),
        ("was designed by {o}", "was planned by {o}, an engineer"),
    ),
    _relation(
        "opening", "railway", "year",
        (("When did {0} open?", "the year when {0} opened"),
         ("In which year was {0} completed?", "the year in which {0} was completed")),
        ("opened in {o}", "was completed in {o}"),
    ),
)  # fmt: skip

_WORKS = (
    _relation(
        "formation", "band", "city",
        (("Where was {0} formed?", "the place where {0} was formed"),
         ("In which city did {0} get together?", "the city in which {0} got together"),
         ("{0} >> location of formation", "the location of formation of {0}")),
        ("was formed in {o}", "got together in {o}"),
    ),
    _relation(
        "label", "band", "label",
        (("Which label signed {0}?", "the label that signed {0}"),
         ("What is the record company of {0}?", "the record company of {0}"),
         ("{0} >> record label", "the record label of {0}")),
        ("is signed to {o}", "records for {o}"),
    ),
    _relation(
        "singer", "band", "person",
        (("Who sings in {0}?", "the person who sings in {0}"),
         ("Who is the lead singer of {0}?", "the lead singer of {0}"),
         ("{0} >> vocalist", "the vocalist of {0}")),
        ("has {o} as its lead singer", "is fronted by {o}"),
    ),
    _relation(
        "drummer", "band", "person",
        (("Who plays the drums in {0}?", "the person who plays the drums in {0}"),
         ("Who is the drummer of {0}?", "the drummer of {0}")),
        ("has {o} on the drums", "counts {o} as its drummer"),
    ),
    _relation(
        "manager", "band", "person",
        (("Who manages {0}?", "the person who manages {0}"),
         ("{0} >> manager", "the manager of {0}")),
        ("is managed by {o}", "took {o} as its manager"),
    ),
    _relation(
        "director", "film", "person",
        (("Who directed {0}?", "the person who directed {0}"),
         ("Which filmmaker shot {0}?", "the filmmaker who shot {0}"),
         ("{0} >> director", "the director of {0}")),
        ("was directed by {o}", "is the work of the director {o}"),
    ),
    _relation(
        "lead", "film", "person",
        (("Who starred in {0}?", "the person who starred in {0}"),
         ("Which actor played the lead in {0}?", "the actor who played the lead in {0}"),
         ("{0} >> cast member", "the cast member of {0}")),
        ("stars {o}", "has {o} in the lead"),
    ),
    _relation(
        "composer", "film", "person",
        (("Who composed the music for {0}?", "the person who composed the music for {0}"),
         ("Who scored {0}?", "the person who scored {0}"),
         ("{0} >> composer", "the composer of {0}")),
        ("has music by {o}", "was scored by {o}"),
    ),
    _relation(
        "studio", "film", "company",
        (("Which company produced {0}?", "the company that produced {0}"),
         ("What studio made {0}?", "the studio that made {0}"),
         ("{0} >> production company", "the production company of {0}")),
        ("was produced by {o}", "was made at the studio of {o}"),
    ),
    _relation(
        "filming", "film", "city",
        (("Where was {0} filmed?", "the place where {0} was filmed"),
         ("{0} >> filming location", "the filming location of {0}")),
        ("was filmed in {o}", "was shot on the streets of {o}"),
    ),
    _relation(
        "based on", "film", "book",
        (("Which book is {0} based on?", "the book that {0} is based on"),
         ("What novel was adapted as {0}?", "the novel that was adapted as {0}"),
         ("{0} >> based on", "the work that {0} is based on")),
        ("is based on the book {o}", "was adapted from {o}"),
    ),
    _relation(
        "theme", "film", "song",
        (("Which song opens {0}?", "the song that opens {0}"),
         ("{0} >> theme music", "the theme music of {0}")),
        ("opens with the song {o}", "uses {o} as its theme"),
    ),
    _relation(
        "release", "film song", "year",
        (("When was {0} released?", "the year when {0} was released"),
         ("In which year did {0} come out?", "the year in which {0} came out"),
         ("{0} >> publication date", "the publication date of {0}")),
        ("was released in {o}", "came out in {o}"),
    ),
    _relation(
        "writer", "book song", "person",
        (("Who wrote {0}?", "the person who wrote {0}"),
         ("Who is the author of {0}?", "the author of {0}"),
         ("{0} >> text by", "the person that the text of {0} is by")),
        ("was written by {o}", "is the work of the author {o}"),
    ),
    _relation(
        "publisher", "book", "company",
        (("Which company published {0}?", "the company that published {0}"),
         ("What house printed {0}?", "the house that printed {0}"),
         ("{0} >> publisher", "the publisher of {0}")),
        ("was published by {o}", "was printed by {o}"),
    ),
    _relation(
        "setting", "book film", "city",
        (("In which city is {0} set?", "the city in which {0} is set"),
         ("Where does the story of {0} take place?", "the place where the story of {0} takes place"),
         ("{0} >> narrative location", "the narrative location of {0}")),
        ("is set in {o}", "tells a story that takes place in {o}"),
    ),
    _relation(
        "illustrator", "book", "person",
        (("Who illustrated {0}?", "the person who illustrated {0}"),
         ("{0} >> illustrator", "the illustrator of {0}")),
        ("was illustrated by {o}", "has drawings by {o}"),
    ),
    _relation(
        "translator", "book", "person",
        (("Who translated {0}?", "the person who translated {0}"),
         ("{0} >> translator", "the translator of {0}")),
        ("was translated by {o}", "owes its best known translation to {o}"),
    ),
    _relation(
        "printing year", "book", "year",
        (("When was {0} published?", "the year when {0} was published"),
         ("In which year did {0} first appear?", "the year in which {0} first appeared")),
        ("was published in {o}", "first appeared in {o}"),
    ),
    _relation(
        "performer", "song", "band",
        (("Which band performed {0}?", "the band that performed {0}"),
         ("What group recorded {0}?", "the group that recorded {0}"),
         ("{0} >> performer", "the performer of {0}")),
        ("was performed by {o}", "was recorded by {o}"),
    ),
    _relation(
        "producer", "song", "person",
        (("Who produced {0}?", "the person who produced {0}"),
         ("{0} >> producer", "the producer of {0}")),
        ("had {o} as its producer", "was recorded under the producer {o}"),
    ),
    _relation(
        "dedication", "book song", "person",
        (("Who is {0} dedicated to?", "the person {0} is dedicated to"),
         ("{0} >> dedicated to", "the dedicatee of {0}")),
        ("is dedicated to {o}", "carries a dedication to {o}"),
    ),
)  # fmt: skip

_PAIRS = (
    _relation(
        "treaty", "country + country", "treaty",
        (("Which treaty did {0} sign with {1}?", "the treaty that {0} signed with {1}"),
         ("What agreement ended the war between {0} and {1}?",
          "the agreement that ended the war between {0} and {1}")),
        ("signed the {o} with {1}", "ended its war with {1} by the {o}"),
    ),
    _relation(
        "ambassador", "country + country", "person",
        (("Which ambassador spoke for {0} in {1}?", "the ambassador who spoke for {0} in {1}"),
         ("Who represented {0} in {1}?", "the person who represented {0} in {1}")),
        ("sent {o} to {1} as its ambassador", "is represented in {1} by {o}"),
    ),
    _relation(
        "railway", "city + city", "railway",
        (("Which railway connects {0} with {1}?", "the railway that connects {0} with {1}"),
         ("What train line runs between {0} and {1}?", "the train line that runs between {0} and {1}")),
        ("is connected with {1} by the {o}", "sends its trains to {1} over the {o}"),
    ),
    _relation(
        "distance", "city + city", "number",
        (("How far is {0} from {1}?", "the distance of {0} from {1}"),
         ("How many kilometres separate {0} and {1}?", "the number of kilometres that separate {0} and {1}")),
        ("is {o} kilometres away from {1}", "is separated by {o} kilometres from {1}"),
    ),
    _relation(
        "honour year", "person + award", "year",
        (("When did {0} win {1}?", "the year when {0} won {1}"),
         ("In which year was {0} honoured with {1}?", "the year in which {0} was honoured with {1}")),
        ("won the {1} in {o}", "took home the {1} in {o}"),
    ),
    _relation(
        "winner of year", "award + year", "person",
        (("Who won {0} in {1}?", "the person who won {0} in {1}"),
         ("Which candidate was picked for {0} in {1}?", "the candidate who was picked for {0} in {1}")),
        ("was won in {1} by {o}", "went to {o} in {1}"),
    ),
    _relation(
        "joint film", "person + person", "film",
        (("Which film did {0} make with {1}?", "the film that {0} made with {1}"),
         ("What movie brought {0} and {1} together?", "the movie that brought {0} and {1} together")),
        ("made the film {o} with {1}", "met {1} on the set of {o}"),
    ),
    _relation(
        "child", "person + person", "person",
        (("Who was the child of {0} and {1}?", "the child of {0} and {1}"),
         ("Who was adopted by {0} and {1}?", "the person who was adopted by {0} and {1}")),
        ("adopted {o} together with {1}", "had {o} as an adopted child with {1}"),
    ),
    _relation(
        "session song", "band + city", "song",
        (("Which song did {0} record in {1}?", "the song that {0} recorded in {1}"),
         ("What tune did {0} play at a concert in {1}?", "the tune that {0} played at a concert in {1}")),
        ("recorded the song {o} in {1}", "first played {o} at a concert in {1}"),
    ),
    _relation(
        "travel book", "person + city country", "book",
        (("Which book did {0} write about {1}?", "the book that {0} wrote about {1}"),
         ("What memoir describes the time of {0} in {1}?",
          "the memoir that describes the time of {0} in {1}")),
        ("wrote the book {o} about {1}", "described a stay in {1} in {o}"),
    ),
    _relation(
        "merger", "company + company", "company",
        (("Which company did {0} set up with {1}?", "the company that {0} set up with {1}"),
         ("What venture was formed by {0} and {1}?", "the venture that was formed by {0} and {1}")),
        ("set up {o} with {1}", "formed {o} as a joint venture with {1}"),
    ),
    _relation(
        "institute", "university + company", "organization",
        (("Which organization did {0} create with {1}?", "the organization that {0} created with {1}"),
         ("What body is run by {0} and {1}?", "the body that is run by {0} and {1}")),
        ("created the {o} with {1}", "runs the {o} together with {1}"),
    ),
    _relation(
        "final", "team + team", "city",
        (("Which city hosted the final between {0} and {1}?",
          "the city that hosted the final between {0} and {1}"),
         ("Where did {0} defeat {1}?", "the place where {0} defeated {1}")),
        ("met {1} in a final held in {o}", "defeated {1} in {o}"),
    ),
    _relation(
        "confluence", "river + river", "city",
        (("Which city lies where {0} meets {1}?", "the city that lies where {0} meets {1}"),
         ("What port was built between {0} and {1}?", "the port that was built between {0} and {1}")),
        ("meets the {1} at {o}", "surrounds {o} together with the {1}"),
    ),
    _relation(
        "transfer", "person + team", "year",
        (("When did {0} join {1}?", "the year when {0} joined {1}"),
         ("In which year did {0} leave {1}?", "the year in which {0} left {1}")),
        ("spent the single season of {o} at {1}", "both joined and left {1} in {o}"),
    ),
)  # fmt: skip

RELATIONS: tuple[Relation, ...] = _PEOPLE + _PLACES + _BODIES + _WORKS + _PAIRS
