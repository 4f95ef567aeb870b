"""Relations of companies, schools, clubs and other bodies in the fictional world.

In: nothing. Out: tuples of `Relation` (see `world_schema`): name, subject types, object type, pairs of sub-question and
noun phrase, statements.
"""

from datamodules.world_schema import relation

BODIES = (
    relation(
        "founder", "company label university organization team", "person",
        (("Who founded {0}?", "the person who founded {0}"),
         ("Who was the founder of {0}?", "the founder of {0}"),
         ("Who established {0}?", "the person who established {0}"),
         ("{0} >> founded by", "the person whom {0} was founded by")),
        ("was founded by {o}", "was established by {o}"),
    ),
    relation(
        "founding year", "company label university organization team city", "year",
        (("When was {0} founded?", "the year when {0} was founded"),
         ("In which year was {0} established?", "the year in which {0} was established"),
         ("{0} >> inception", "the inception of {0}")),
        ("was founded in {o}", "dates from {o}"),
    ),
    relation(
        "headquarters", "company label university organization", "city",
        (("Where is {0} based?", "the place where {0} is based"),
         ("Which city is home to {0}?", "the city that is home to {0}"),
         ("{0} >> headquarters location", "the headquarters location of {0}")),
        ("is based in {o}", "has its headquarters in {o}"),
    ),
    relation(
        "chief", "company label", "person",
        (("Who runs {0}?", "the person who runs {0}"),
         ("Who is the head of {0}?", "the head of {0}"),
         ("{0} >> chief executive officer", "the chief executive officer of {0}")),
        ("is run by {o}", "appointed {o} as chief executive officer"),
    ),
    relation(
        "owner", "company label team", "company",
        (("Which company owns {0}?", "the company that owns {0}"),
         ("What firm bought {0}?", "the firm that bought {0}"),
         ("{0} >> owned by", "the company which {0} is owned by")),
        ("is owned by {o}", "was bought by {o}"),
    ),
    relation(
        "employees", "company university", "quantity",
        (("How many people work at {0}?", "the number of people who work at {0}"),
         ("{0} >> employees", "the employee count of {0}")),
        ("employs {o} people", "has a staff of {o}"),
    ),
    relation(
        "first signing", "label", "band",
        (("Which band was the first to sign with {0}?", "the band that was the first to sign with {0}"),
         ("What group opened the catalogue of {0}?", "the group that opened the catalogue of {0}")),
        ("signed {o} as its first band", "opened its catalogue with {o}"),
    ),
    relation(
        "rector", "university", "person",
        (("Who is the rector of {0}?", "the rector of {0}"),
         ("Who heads {0}?", "the person who heads {0}"),
         ("{0} >> president of the institution", "the president of the institution {0}")),
        ("is headed by its rector, {o}", "chose {o} as its rector"),
    ),
    relation(
        "namesake", "award university mountain", "person",
        (("Who is {0} named after?", "the person {0} is named after"),
         ("Whose name does {0} bear?", "the person whose name {0} bears"),
         ("{0} >> named after", "the namesake of {0}")),
        ("is named after {o}", "bears the name of {o} on its seal"),
    ),
    relation(
        "chair", "organization", "person",
        (("Who chairs {0}?", "the person who chairs {0}"),
         ("Who presides over {0}?", "the person who presides over {0}"),
         ("{0} >> chairperson", "the chairperson of {0}")),
        ("is chaired by {o}", "elected {o} as its chairperson"),
    ),
    relation(
        "parent organization", "organization", "organization",
        (("Which organization is {0} part of?", "the organization which {0} is part of"),
         ("{0} >> parent organization", "the parent organization of {0}")),
        ("is part of the {o}", "has the {o} as its parent organization"),
    ),
    relation(
        "members", "organization", "quantity",
        (("How many members does {0} have?", "the number of members which {0} has"),
         ("{0} >> member count", "the member count of {0}")),
        ("has {o} members", "counts {o} members"),
    ),
    relation(
        "presenter", "award", "organization",
        (("Which organization presents {0}?", "the organization that presents {0}"),
         ("{0} >> conferred by", "the organization which {0} is conferred by")),
        ("is presented by the {o}", "is conferred each spring by the {o}"),
    ),
    relation(
        "first winner", "award", "person",
        (("Who was the first winner of {0}?", "the first winner of {0}"),
         ("Who received the earliest {0}?", "the person who received the earliest {0}"),
         ("{0} >> winner", "the winner of {0}")),
        ("had {o} as its first winner", "went to {o} when it was first given"),
    ),
    relation(
        "ceremony", "award", "city",
        (("Where is {0} presented?", "the place where {0} is presented"),
         ("Which city hosts the ceremony of {0}?", "the city that hosts the ceremony of {0}")),
        ("is presented in {o}", "is handed over at a ceremony in {o}"),
    ),
    relation(
        "home city", "team", "city",
        (("Where does {0} play?", "the place where {0} plays"),
         ("Which city does {0} represent?", "the city which {0} represents"),
         ("{0} >> home venue", "the home venue of {0}")),
        ("plays in {o}", "represents {o}"),
    ),
    relation(
        "coach", "team", "person",
        (("Who coaches {0}?", "the person who coaches {0}"),
         ("Who is the trainer of {0}?", "the trainer of {0}"),
         ("{0} >> head coach", "the head coach of {0}")),
        ("is coached by {o}", "hired {o} as its coach"),
    ),
    relation(
        "captain", "team", "person",
        (("Who captains {0}?", "the person who captains {0}"),
         ("Who is the captain of {0}?", "the captain of {0}")),
        ("is captained by {o}", "made {o} its captain"),
    ),
    relation(
        "mediator", "treaty", "person",
        (("Who mediated {0}?", "the person who mediated {0}"),
         ("Who drafted the text of {0}?", "the person who drafted the text of {0}")),
        ("was mediated by {o}", "was drafted by {o}"),
    ),
    relation(
        "signing place", "treaty", "city",
        (("Where was {0} signed?", "the place where {0} was signed"),
         ("Which city hosted the signing of {0}?", "the city that hosted the signing of {0}")),
        ("was signed in {o}", "was concluded in {o}"),
    ),
    relation(
        "signing year", "treaty", "year",
        (("When was {0} signed?", "the year when {0} was signed"),
         ("In which year did {0} take effect?", "the year in which {0} took effect")),
        ("took effect in {o}", "dates from {o}"),
    ),
    relation(
        "builder", "railway", "company",
        (("Which company built {0}?", "the company that built {0}"),
         ("What firm operates {0}?", "the firm that operates {0}")),
        ("was built by {o}", "is operated by {o}, which built it"),
    ),
    relation(
        "engineer", "railway", "person",
        (("Who designed {0}?", "the person who designed {0}"),
         ("Which engineer planned {0}?", "the engineer who planned {0}")),
        ("was designed by {o}", "was planned by {o}, an engineer"),
    ),
    relation(
        "opening", "railway", "year",
        (("When did {0} open?", "the year when {0} opened"),
         ("In which year was {0} completed?", "the year in which {0} was completed")),
        ("opened in {o}", "was completed in {o}"),
    ),
)  # fmt: skip
