"""Text of the benchmark without a language model: answer types, keywords, noun phrases, questions.

In:  a checked `SrcGraph` and the reference phrases of its entry nodes.
Out: `annotate` fills the type of every node; `keywords` gives the keyword field of a trace (Figure 8 of CMT-RAG);
     `Wording.question` / `Wording.noun` word a node for a user; `carrier_question` adds a relocated sub-question.

Total functions: every node gets a wording, at worst `the answer to "..."`, which a question may use once.
Source: CMT-RAG appendix A (prompts A, B, C), here as templates.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from datamodules.mumu_nouns import noun_form
from datamodules.mumu_relations import COUNTRIES, HEAD_NOUNS, RELATIONS, STATES, NodeTemplate
from datamodules.musique import REFERENCE, SrcGraph, SrcNode, normalise, tidy

MAX_KEYWORDS = 12

_WH = frozenset("who whom whose what which when where why how".split())
_STOP = _WH | frozenset(
    """a an the of in on at to for from by with as and or but nor that this these those there here it its is was are
    were be been being am do does did done has have had having will would can could shall should may might must not no
    into onto than then so if also about name called named i you he she they we his her their your my our us them him me
    such some any s""".split()
)
_MONTH = "january|february|march|april|may|june|july|august|september|october|november|december"
_NUMBER_WORD = (
    "one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty|thirty|forty|fifty|hundred"
)
_UNIT = (
    "percent|%|million|billion|thousand|hundred|trillion|years?|months?|days?|hours?|minutes?|km|kilomet(?:er|re)s?|"
    "miles?|met(?:er|re)s?|feet|ft|m|kg|tons?|people|residents|inhabitants|dollars|euros|pounds|acres|square|times|"
    "seasons|episodes|books|championships|titles|mm|cm|mi|km2|mph"
)
_HEDGE = (
    r"(?:about|around|over|under|nearly|almost|approximately|more than|less than|at least|circa|c\.|some)\s+"
)
_QUANTITY = re.compile(
    rf"(?:{_HEDGE})?(?:us)?[£$€]?\s*(?:\d[\d,.\s–-]*|(?:{_NUMBER_WORD})(?:[ -](?:{_NUMBER_WORD}))*)"
    rf"(?:\s*(?:{_UNIT}))*(?:\s*\(.*\))?",
    re.I,
)
_YEAR = re.compile(r"(?:in |by |since |c\. ?|circa )?(?:1\d{3}|20\d{2})(?: (?:ad|ce))?", re.I)
_TIME = re.compile(
    rf"(?:.*\b(?:{_MONTH})\b.*\d.*|(?:{_MONTH})|.*\b\d{{1,2}}(?:st|nd|rd|th)[ -](?:century|centuries)\b.*|"
    rf".*\b\d{{3,4}}s\b|.*\b\d{{3,4}}\s*[–-]\s*\d{{2,4}}\b.*|\d{{1,2}}(?:st|nd|rd|th)(?: and \d{{1,2}}th)?|"
    rf".*\b\d+ (?:bc|bce|ad)\b.*)",
    re.I,
)
_FORM_TYPES = ("year", "time", "quantity", "yesno", "country", "state")
_PHRASE_WORD = {"entity": "one", "quantity": "number", "yesno": "one"}


def topic_words(nodes: Iterable[SrcNode]) -> set[str]:
    """The content words of the titles and sub-questions of some nodes (mumu-qa 4.7: what a topic is made of)."""
    return {word for node in nodes for text in (node.title, node.text) for word in content_words(text)}


def phrase(kind: str, phrases: Mapping[str, str] | None = None) -> str:
    """How a later turn refers to an answer of a type: "that person", "that one" for an untyped entity."""
    if phrases and kind in phrases:
        return phrases[kind]
    return f"that {_PHRASE_WORD.get(kind, kind)}"


def pick(options: Sequence[str], key: str) -> str:
    """A choice that depends on `key` only (not on a random state), so that a wording is stable."""
    return options[
        int.from_bytes(hashlib.sha1(key.encode("utf-8", "replace")).digest()[:4], "big") % len(options)
    ]


def answer_type(text: str, answer: str) -> str:
    """The type of an answer: its own form first (date, number), then the nouns and wh-word of the sub-question."""
    answer, words = answer.strip(), re.findall(r"[\w']+", text.lower())
    how_many = bool(re.search(r"\bhow (?:many|much|long|old|far|large|big|tall)\b", text.lower()))
    if answer.lower() in ("yes", "no"):
        return "yesno"
    if _YEAR.fullmatch(answer) and not how_many:
        return "year"
    if _TIME.fullmatch(answer) and len(answer) <= 60 and words[:1] != ["who"]:
        return "time"
    if (_QUANTITY.fullmatch(answer) and (words[:1] != ["who"])) or (how_many and re.search(r"\d", answer)):
        return "quantity"
    if known := known_place(answer):
        return known
    words = re.findall(r"[\w']+", re.sub(r"\b(?:is|was) the name of\b", "", text.lower()))
    for at, word in enumerate(words[:3]):
        if word in ("what", "which"):
            for noun in words[at + 1 : at + 6]:
                if noun in HEAD_NOUNS:
                    return HEAD_NOUNS[noun]
            break
    if words and (words[0] in ("who", "who's", "whom") or words[-1] == "whom"):
        return "person"
    if "where" in words[:2] or words[-1:] == ["where"]:
        return "place"
    return "entity"


def known_place(answer: str) -> str | None:
    """ "country" or "state" for an answer that names a well-known one, else None."""
    name = normalise(answer)
    return "country" if name in COUNTRIES else "state" if name in STATES else None


def keywords(sub_question: str) -> str:
    """The sub-question without function and question words (CMT-RAG, Figure 8).

    `Which label was bought by [A28] in the UK?` -> `label bought [A28] UK`. References and order are kept, words are
    unique, at most `MAX_KEYWORDS` tokens; when there are more, words go before references.
    """
    tokens: dict[str, str] = {}
    bare: dict[str, str] = {}
    for token in re.findall(r"\[A\d+\]|\w+(?:['’.&-]\w+)*", sub_question.replace(" >> ", " ")):
        token = re.sub(r"['’]s$", "", token)
        bare.setdefault(token.lower(), token)
        if token.lower() not in _STOP:
            tokens.setdefault(token.lower(), token)
    kept = list((tokens or bare).values())
    room = MAX_KEYWORDS - sum(token.startswith("[A") for token in kept)
    out = []
    for token in kept:
        if not token.startswith("[A"):
            if room <= 0:
                continue
            room -= 1
        out.append(token)
    return " ".join(out[:MAX_KEYWORDS])


def content_words(text: str) -> list[str]:
    """Lower-cased words of a text that carry meaning, in order, references dropped."""
    return [w for w in re.findall(r"[^\W_]+", re.sub(r"\[A\d+\]|#\d+", " ", text.lower())) if w not in _STOP]


@dataclass(frozen=True)
class Worded:
    """A wording and how many `the answer to "..."` it needed."""

    text: str
    fallbacks: int = 0


class Wording:
    """Words nodes by templates first, then by the form of the sub-question.

    `templates` come before the built-in relation table; `phrases` overrides "that <type>" for some types.
    """

    def __init__(self, templates: Iterable[NodeTemplate] = (), phrases: Mapping[str, str] | None = None):
        self.phrases = dict(phrases or {})
        self._buckets: dict[str, list[tuple[re.Pattern[str], NodeTemplate]]] = {}
        extra = sorted(templates, key=lambda t: -len(t.question))
        for template in (*extra, *RELATIONS):
            head, _, tail = template.question.partition(" ")
            key = tail.rpartition(">> ")[2] if ">>" in tail else ("" if "{" in head else head.lower())
            self._buckets.setdefault(key, []).append((_pattern(template.question), template))
        self._matches: dict[str, tuple[NodeTemplate, tuple[str, ...]] | None] = {}

    def match(self, text: str) -> tuple[NodeTemplate, tuple[str, ...]] | None:
        """The template whose question form is the whole of `text`, and its subjects."""
        if text not in self._matches:
            self._matches[text] = self._search(text)
        return self._matches[text]

    def _search(self, text: str) -> tuple[NodeTemplate, tuple[str, ...]] | None:
        keys = (text.rpartition(">> ")[2],) if ">>" in text else (text.partition(" ")[0].lower(), "")
        for key in keys:
            for pattern, template in self._buckets.get(key, ()):
                if found := pattern.fullmatch(text):
                    groups = found.groupdict()
                    return template, tuple(groups[name] for name in sorted(groups))
        return None

    def type_of(self, node: SrcNode) -> str:
        """The answer type of a node (mumu-qa: form of the answer, relation table, sub-question)."""
        found = self.match(node.text)
        form = answer_type(node.text.partition(" >> ")[0] if ">>" in node.text else node.text, node.answer)
        if found is None:
            return (
                form if ">>" not in node.text or form in ("year", "time", "quantity", "yesno") else "entity"
            )
        kind = found[0].type
        if (
            found[0] in RELATIONS
            and form in ("year", "time", "quantity")
            and kind not in ("person", "company")
        ):
            return form
        return kind

    def phrase(self, kind: str) -> str:
        return phrase(kind, self.phrases)

    def noun(self, graph: SrcGraph, i: int, entries: Mapping[int, str]) -> Worded:
        """Node i as a noun phrase; references to a node in `entries` read as its phrase, others as noun phrases."""
        text = graph.nodes[i].text
        found = self.match(text)
        if found is not None:
            return self._render(graph, found[0].noun, found[1], entries)
        if ">>" in text:
            subject, _, relation = text.partition(">>")
            filled = self._fill(graph, subject.strip(), entries)
            return Worded(f"the {relation.strip()} of {filled.text}", filled.fallbacks)
        filled = self._fill(graph, text, entries)
        form = noun_form(filled.text)
        if form is not None and filled.fallbacks == 0:
            return Worded(form)
        inner = filled.text.rstrip("?!. ")
        return Worded(f'the answer to "{lower_first(inner)}"', filled.fallbacks + 1)

    def question(self, graph: SrcGraph, i: int, entries: Mapping[int, str]) -> Worded:
        """Node i as a question of a turn."""
        text = graph.nodes[i].text
        found = self.match(text)
        if found is not None and found[0].ask is not None:
            body = self._render(graph, found[0].ask, found[1], entries)
        elif ">>" in text:
            noun = self.noun(graph, i, entries)
            who = "Who" if graph.nodes[i].type == "person" else "What"
            body = Worded(f"{who} is {noun.text}", noun.fallbacks)
        else:
            body = self._fill(graph, text, entries)
        return Worded(as_question(body.text), body.fallbacks)

    def _render(
        self, graph: SrcGraph, template: str, subjects: tuple[str, ...], entries: Mapping[int, str]
    ) -> Worded:
        filled = [self._fill(graph, subject, entries) for subject in subjects]
        text = re.sub(r"\{(\d)\}", lambda m: filled[int(m.group(1))].text, template)
        return Worded(text, sum(f.fallbacks for f in filled))

    def _fill(self, graph: SrcGraph, text: str, entries: Mapping[int, str]) -> Worded:
        """Replace every `#k` by the phrase of an entry or the noun phrase of the node it names."""
        fallbacks = 0

        def put(match: re.Match[str]) -> str:
            nonlocal fallbacks
            r = int(match.group(1)) - 1
            if r in entries:
                words = entries[r]
            else:
                noun = self.noun(graph, r, entries)
                fallbacks += noun.fallbacks
                words = noun.text
            before = text[: match.start()].rstrip().lower()
            # "the #2 of ..." and "king #1": no second article.
            if re.search(r"\b(?:the|a|an)$", before) and re.match(r"(?:the|that) ", words):
                words = words.partition(" ")[2] if words.startswith("the ") else words
            return words

        out = REFERENCE.sub(put, text)
        return Worded(re.sub(r"\b([Tt]he|[Aa]n?) (that )", r"\2", out), fallbacks)


def takes_phrase(text: str, r: int) -> bool:
    """Whether "that city" can stand for `#r+1` (r 0-based) in a sub-question: not in `the new #1`, `#1 1. and 2.0`."""
    name = rf"#{r + 1}\b"
    articled = re.search(
        rf"\b(?:the|an?) (?!(?:of|in|by|to|at|on|with|for|from|is|was)\b)[\w-]+ {name}", text, re.I
    )
    return articled is None and re.search(rf"{name} \d", text) is None


def annotate(graphs: Iterable[SrcGraph], wording: Wording) -> list[SrcGraph]:
    """The graphs with the type of every node filled in."""
    return [replace(g, nodes=tuple(replace(n, type=wording.type_of(n)) for n in g.nodes)) for g in graphs]


def _pattern(question: str) -> re.Pattern[str]:
    parts = re.split(r"\{(\d)\}", question)
    seen: set[str] = set()
    out = []
    for n, part in enumerate(parts):
        if n % 2 == 0:
            out.append(re.escape(part))
        elif part in seen:
            out.append(f"(?P=s{part})")
        else:
            seen.add(part)
            out.append(f"(?P<s{part}>.+)")
    return re.compile("".join(out), re.I)


def as_question(text: str) -> str:
    """Tidy, capitalised, with exactly one question mark at the end."""
    text = tidy(text).rstrip("?.!, ")
    return f"{text[:1].upper()}{text[1:]}?"


_LOWERABLE = _STOP | frozenset(
    "since along according despite after before during among under name one besides given".split()
)


def lower_first(text: str) -> str:
    """Lower-case the first letter unless the first word looks like a name."""
    head = re.match(r"\w+", text)
    return (
        text[:1].lower() + text[1:]
        if head and head.group(0).lower() in _LOWERABLE and head.group(0) != "I"
        else text
    )


_CARRIERS_COLON = ("I would like to know {aux}, and also: {q}", "First find {aux}. Then tell me: {q}")
CARRIERS = (
    "Besides asking about {aux}, {q}",
    "In addition to {aux}, {q}",
    "Apart from {aux}, {q}",
    *_CARRIERS_COLON,
    "Along with {aux}, {q}",
)
_OPENER = re.compile(r"(?:please )?(?:tell me|find out|i would like to know|i want to know)[:,] +", re.I)
# A question that opens with a request, or has several sentences, cannot continue a sentence.
_REQUEST = re.compile(r"(?i:please|consider|tell|find|give|take|think|can|could|would|i)\b|.*\w{2}\. [A-Z]")


def without_opener(question: str) -> str:
    """The question without a polite opening such as "Please find out:"; another question can be put before it."""
    bare = _OPENER.sub("", question, count=1) if _OPENER.match(question) else question
    return bare[:1].upper() + bare[1:]


def carrier_question(aux: str, question: str, key: str) -> str:
    """Prompt B as a template: a question that also asks for a relocated sub-question (noun phrase `aux`)."""
    question = without_opener(question)
    if _REQUEST.match(question):
        return pick(_CARRIERS_COLON, key).format(aux=aux, q=question)
    return pick(CARRIERS, key).format(aux=aux, q=lower_first(question))
