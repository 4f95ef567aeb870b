"""Relations of works and performers, and relations between two subjects, in the fictional world.

In: nothing. Out: tuples of `Relation` (see `world_schema`): name, subject types, object type, pairs of sub-question and
noun phrase, statements.
"""

from datamodules.world_schema import relation

WORKS = (
    relation(
        "formation", "band", "city",
        (("Where was {0} formed?", "the place where {0} was formed"),
         ("In which city did {0} get together?", "the city in which {0} got together"),
         ("{0} >> location of formation", "the location of formation of {0}")),
        ("was formed in {o}", "got together in {o}"),
    ),
    relation(
        "label", "band", "label",
        (("Which label signed {0}?", "the label that signed {0}"),
         ("What is the record company of {0}?", "the record company of {0}"),
         ("{0} >> record label", "the record label of {0}")),
        ("is signed to {o}", "records for {o}"),
    ),
    relation(
        "singer", "band", "person",
        (("Who sings in {0}?", "the person who sings in {0}"),
         ("Who is the lead singer of {0}?", "the lead singer of {0}"),
         ("{0} >> vocalist", "the vocalist of {0}")),
        ("has {o} as its lead singer", "is fronted by {o}"),
    ),
    relation(
        "drummer", "band", "person",
        (("Who plays the drums in {0}?", "the person who plays the drums in {0}"),
         ("Who is the drummer of {0}?", "the drummer of {0}")),
        ("has {o} on the drums", "counts {o} as its drummer"),
    ),
    relation(
        "manager", "band", "person",
        (("Who manages {0}?", "the person who manages {0}"),
         ("{0} >> manager", "the manager of {0}")),
        ("is managed by {o}", "took {o} as its manager"),
    ),
    relation(
        "director", "film", "person",
        (("Who directed {0}?", "the person who directed {0}"),
         ("Which filmmaker shot {0}?", "the filmmaker who shot {0}"),
         ("{0} >> director", "the director of {0}")),
        ("was directed by {o}", "is the work of the director {o}"),
    ),
    relation(
        "lead", "film", "person",
        (("Who starred in {0}?", "the person who starred in {0}"),
         ("Which actor played the lead in {0}?", "the actor who played the lead in {0}"),
         ("{0} >> cast member", "the cast member of {0}")),
        ("stars {o}", "has {o} in the lead"),
    ),
    relation(
        "composer", "film", "person",
        (("Who composed the music for {0}?", "the person who composed the music for {0}"),
         ("Who scored {0}?", "the person who scored {0}"),
         ("{0} >> composer", "the composer of {0}")),
        ("has music by {o}", "was scored by {o}"),
    ),
    relation(
        "studio", "film", "company",
        (("Which company produced {0}?", "the company that produced {0}"),
         ("What studio made {0}?", "the studio that made {0}"),
         ("{0} >> production company", "the production company of {0}")),
        ("was produced by {o}", "was made at the studio of {o}"),
    ),
    relation(
        "filming", "film", "city",
        (("Where was {0} filmed?", "the place where {0} was filmed"),
         ("{0} >> filming location", "the filming location of {0}")),
        ("was filmed in {o}", "was shot on the streets of {o}"),
    ),
    relation(
        "based on", "film", "book",
        (("Which book is {0} based on?", "the book which {0} is based on"),
         ("What novel was adapted as {0}?", "the novel that was adapted as {0}"),
         ("{0} >> based on", "the work which {0} is based on")),
        ("is based on the book {o}", "was adapted from {o}"),
    ),
    relation(
        "theme", "film", "song",
        (("Which song opens {0}?", "the song that opens {0}"),
         ("{0} >> theme music", "the theme music of {0}")),
        ("opens with the song {o}", "uses {o} as its theme"),
    ),
    relation(
        "release", "film song", "year",
        (("When was {0} released?", "the year when {0} was released"),
         ("In which year did {0} come out?", "the year in which {0} came out"),
         ("{0} >> publication date", "the publication date of {0}")),
        ("was released in {o}", "came out in {o}"),
    ),
    relation(
        "writer", "book song", "person",
        (("Who wrote {0}?", "the person who wrote {0}"),
         ("Who is the author of {0}?", "the author of {0}"),
         ("{0} >> text by", "the person whom the text of {0} is by")),
        ("was written by {o}", "is the work of the author {o}"),
    ),
    relation(
        "publisher", "book", "company",
        (("Which company published {0}?", "the company that published {0}"),
         ("What house printed {0}?", "the house that printed {0}"),
         ("{0} >> publisher", "the publisher of {0}")),
        ("was published by {o}", "was printed by {o}"),
    ),
    relation(
        "setting", "book film", "city",
        (("In which city is {0} set?", "the city in which {0} is set"),
         ("Where does the story of {0} take place?", "the place where the story of {0} takes place"),
         ("{0} >> narrative location", "the narrative location of {0}")),
        ("is set in {o}", "tells a story that takes place in {o}"),
    ),
    relation(
        "illustrator", "book", "person",
        (("Who illustrated {0}?", "the person who illustrated {0}"),
         ("{0} >> illustrator", "the illustrator of {0}")),
        ("was illustrated by {o}", "has drawings by {o}"),
    ),
    relation(
        "translator", "book", "person",
        (("Who translated {0}?", "the person who translated {0}"),
         ("{0} >> translator", "the translator of {0}")),
        ("was translated by {o}", "owes its best known translation to {o}"),
    ),
    relation(
        "printing year", "book", "year",
        (("When was {0} published?", "the year when {0} was published"),
         ("In which year did {0} first appear?", "the year in which {0} first appeared")),
        ("was published in {o}", "first appeared in {o}"),
    ),
    relation(
        "performer", "song", "band",
        (("Which band performed {0}?", "the band that performed {0}"),
         ("What group recorded {0}?", "the group that recorded {0}"),
         ("{0} >> performer", "the performer of {0}")),
        ("was performed by {o}", "was recorded by {o}"),
    ),
    relation(
        "producer", "song", "person",
        (("Who produced {0}?", "the person who produced {0}"),
         ("{0} >> producer", "the producer of {0}")),
        ("had {o} as its producer", "was recorded under the producer {o}"),
    ),
    relation(
        "dedication", "book song", "person",
        (("Who is {0} dedicated to?", "the person {0} is dedicated to"),
         ("{0} >> dedicated to", "the dedicatee of {0}")),
        ("is dedicated to {o}", "carries a dedication to {o}"),
    ),
)  # fmt: skip

PAIRS = (
    relation(
        "treaty", "country + country", "treaty",
        (("Which treaty did {0} sign with {1}?", "the treaty which {0} signed with {1}"),
         ("What agreement ended the war between {0} and {1}?",
          "the agreement that ended the war between {0} and {1}")),
        ("signed the {o} with {1}", "ended its war with {1} by the {o}"),
    ),
    relation(
        "ambassador", "country + country", "person",
        (("Which ambassador spoke for {0} in {1}?", "the ambassador who spoke for {0} in {1}"),
         ("Who represented {0} in {1}?", "the person who represented {0} in {1}")),
        ("sent {o} to {1} as its ambassador", "is represented in {1} by {o}"),
    ),
    relation(
        "railway", "city + city", "railway",
        (("Which railway connects {0} with {1}?", "the railway that connects {0} with {1}"),
         ("What train line runs between {0} and {1}?", "the train line that runs between {0} and {1}")),
        ("is connected with {1} by the {o}", "sends its trains to {1} over the {o}"),
    ),
    relation(
        "distance", "city + city", "quantity",
        (("How far is {0} from {1}?", "the distance of {0} from {1}"),
         ("How many kilometres separate {0} and {1}?", "the number of kilometres that separate {0} and {1}")),
        ("is {o} kilometres away from {1}", "is separated by {o} kilometres from {1}"),
    ),
    relation(
        "honour year", "person + award", "year",
        (("When did {0} win {1}?", "the year when {0} won {1}"),
         ("In which year was {0} honoured with {1}?", "the year in which {0} was honoured with {1}")),
        ("won the {1} in {o}", "took home the {1} in {o}"),
    ),
    relation(
        "winner of year", "award + year", "person",
        (("Who won {0} in {1}?", "the person who won {0} in {1}"),
         ("Which candidate was picked for {0} in {1}?", "the candidate who was picked for {0} in {1}")),
        ("was won in {1} by {o}", "went to {o} in {1}"),
    ),
    relation(
        "joint film", "person + person", "film",
        (("Which film did {0} make with {1}?", "the film which {0} made with {1}"),
         ("What movie brought {0} and {1} together?", "the movie that brought {0} and {1} together")),
        ("made the film {o} with {1}", "met {1} on the set of {o}"),
    ),
    relation(
        "child", "person + person", "person",
        (("Who was the child of {0} and {1}?", "the child of {0} and {1}"),
         ("Who was adopted by {0} and {1}?", "the person who was adopted by {0} and {1}")),
        ("adopted {o} together with {1}", "had {o} as an adopted child with {1}"),
    ),
    relation(
        "session song", "band + city", "song",
        (("Which song did {0} record in {1}?", "the song which {0} recorded in {1}"),
         ("What tune did {0} play at a concert in {1}?", "the tune which {0} played at a concert in {1}")),
        ("recorded the song {o} in {1}", "first played {o} at a concert in {1}"),
    ),
    relation(
        "travel book", "person + city country", "book",
        (("Which book did {0} write about {1}?", "the book which {0} wrote about {1}"),
         ("What memoir describes the time of {0} in {1}?",
          "the memoir that describes the time of {0} in {1}")),
        ("wrote the book {o} about {1}", "described a stay in {1} in {o}"),
    ),
    relation(
        "merger", "company + company", "company",
        (("Which company did {0} set up with {1}?", "the company which {0} set up with {1}"),
         ("What venture was formed by {0} and {1}?", "the venture that was formed by {0} and {1}")),
        ("set up {o} with {1}", "formed {o} as a joint venture with {1}"),
    ),
    relation(
        "institute", "university + company", "organization",
        (("Which organization did {0} create with {1}?", "the organization which {0} created with {1}"),
         ("What body is run by {0} and {1}?", "the body that is run by {0} and {1}")),
        ("created the {o} with {1}", "runs the {o} together with {1}"),
    ),
    relation(
        "final", "team + team", "city",
        (("Which city hosted the final between {0} and {1}?",
          "the city that hosted the final between {0} and {1}"),
         ("Where did {0} defeat {1}?", "the place where {0} defeated {1}")),
        ("met {1} in a final held in {o}", "defeated {1} in {o}"),
    ),
    relation(
        "confluence", "river + river", "city",
        (("Which city lies where {0} meets {1}?", "the city that lies where {0} meets {1}"),
         ("What port was built between {0} and {1}?", "the port that was built between {0} and {1}")),
        ("meets the {1} at {o}", "surrounds {o} together with the {1}"),
    ),
    relation(
        "transfer", "person + team", "year",
        (("When did {0} join {1}?", "the year when {0} joined {1}"),
         ("In which year did {0} leave {1}?", "the year in which {0} left {1}")),
        ("spent the single season of {o} at {1}", "both joined and left {1} in {o}"),
    ),
)  # fmt: skip
