"""Text from which the embedded base learns to read questions, to copy names, and to write numbered sub-questions.

In:  fictional worlds of other seeds than the one the stages train on (or a built MuMu directory), and their
     encyclopedia paragraphs. Out: packed batches of plain text: the structural tokens stay unknown to the base, as they
     are to Mamba-2 2.7B, and stage 1 teaches them. design.md section 4 (embedded default).

A turn is written in one of two layouts, `inline` and `lines`:

    Which label signed the singer of Blue Rain?                     Which label signed the singer of Blue Rain?
    (1) Who sang Blue Rain? / sang Blue Rain /                      (1)
    (2) Which label signed [A1]? / label signed [A1] / [1]          Who sang Blue Rain?
                                                                    sang Blue Rain
                                                                    -
                                                                    (2)
                                                                    …
                                                                    =

All of it carries loss: the lines of traces with weight 1, questions and paragraphs with `loss_on_query`. Within a line
the first word of a field begins with a blank and is another token than in a plan; on its own line it is the same one.

Two things make the state learn fast what a question asks for only once in a while: which trace "that person" means.
*Reminders* say it, after some turns of some dialogues; *drills* are the bare traces of a stretch of a long dialogue,
each followed by three reminders, and only the number in a reminder carries loss (docs/decisions.md):

    (2) Which label signed [A1]? / label signed [A1] / [1]
    that band [A1]
    that label [A2]
"""

from __future__ import annotations

import random
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, get_args

from datamodules.mumu import Dialogue, Trace
from datamodules.mumu_relations import could_denote
from datamodules.mumu_text import phrase
from datamodules.packed_data import PackedData, PlannedTurn, describe, log, spread
from datamodules.packing import Document
from datamodules.tokenizer import train_tokenizer, world_corpus
from datamodules.traces import draft, planned_turns, read_split
from datamodules.world import GENERATOR_VERSION, build_world, default_world, memory_home, world_text
from inference.tokens import PlanTokenizer
from inference.traces import TraceDraft, sanitise_query

SPLITS = ("stage1", "short", "long", "ultra")
KINDS = (*SPLITS, "drills", "paragraphs")
Layout = Literal["inline", "lines"]
_REFERENCE = re.compile(rb"\[A?(\d+)\]")


class PretrainData(PackedData):
    """Dialogues as plain text, mixed with paragraphs.

    Args:
        path: a built MuMu directory; null builds a world for each of `seeds`.
        seeds: worlds to read (each has its own names). The development set is that of the embedded world (seed 42),
            which shares no name with any of them.
        questions: source questions of each world.
        mix: passes an epoch makes over each kind: `stage1`, `short`, `long`, `ultra` dialogues (0.5 takes every
            second one, 2 takes each twice), `drills` (one for each long and ultra-long dialogue) and `paragraphs` (of
            `paragraphs_per_world`).
        paragraphs_per_world: encyclopedia paragraphs of each world.
        vocab_size: tokens of the tokenizer, without the seven structural ones.
        tokenizer: a tokenizer directory to use instead of training one.
        batch_size: documents in a batch of one process.
        val_batch_size: documents in a validation batch.
        layout: `inline` writes a trace on one line, `lines` gives each of its fields a line.
        max_length: tokens of a document; a longer dialogue is cut at a turn border.
        loss_on_query: weight of questions and paragraphs in the loss.
        loss_on_references: weight of references to earlier turns in the numbered lines (the rest of a line weighs 1).
        reminders: share of the dialogues that carry reminders.
        drill_traces: fewest and most traces of a drill.
        drill_reminders: reminders after each of its traces (fewer where fewer types are known).
        limit_train: use only this many documents (spread evenly).
        limit_dev: use only this many development dialogues.
        seed: order of the documents, together with the epoch.
        max_row_tokens: split a packed batch into rows of at most this many tokens (null: one row).
    """

    def __init__(
        self,
        path: str | None = None,
        seeds: Sequence[int] = (101, 102, 103, 104),
        questions: int = 6000,
        mix: dict[str, float] | None = None,
        paragraphs_per_world: int = 1000,
        vocab_size: int = 4089,
        tokenizer: str | None = None,
        batch_size: int = 16,
        val_batch_size: int = 16,
        layout: Layout = "inline",
        max_length: int = 2048,
        loss_on_query: float = 0.1,
        loss_on_references: float = 1.0,
        reminders: float = 0.0,
        drill_traces: tuple[int, int] = (6, 40),
        drill_reminders: int = 3,
        limit_train: int | None = None,
        limit_dev: int | None = None,
        seed: int = 42,
        max_row_tokens: int | None = None,
    ) -> None:
        super().__init__(batch_size, val_batch_size, seed, max_row_tokens)
        self.path = Path(path) if path is not None else None
        if self.path is not None and not self.path.is_dir():
            raise FileNotFoundError(f"data.path {path} is not a directory")
        self.seeds, self.questions = list(seeds), questions
        self.mix = dict.fromkeys(KINDS, 1.0) if mix is None else dict(mix)
        unknown = sorted(set(self.mix) - set(KINDS))
        if unknown:
            raise ValueError(f"data.mix has the unknown key {unknown[0]!r}: it knows {', '.join(KINDS)}")
        self.paragraphs_per_world = paragraphs_per_world
        self.vocab_size, self.tokenizer = vocab_size, tokenizer
        if layout not in get_args(Layout):
            raise ValueError(f"data.layout is {layout!r}: it is {' or '.join(get_args(Layout))}")
        self.layout: Layout = layout
        self.max_length, self.loss_on_query = max_length, loss_on_query
        if not 0 <= reminders <= 1:
            raise ValueError(f"data.reminders is {reminders}: it is a share of the dialogues, from 0 to 1")
        if not 1 <= drill_traces[0] <= drill_traces[1]:
            raise ValueError(
                f"data.drill_traces is {list(drill_traces)}: it is the fewest and the most traces"
            )
        self.reminders, self.loss_on_references = reminders, loss_on_references
        if drill_reminders < 1:
            raise ValueError(f"data.drill_reminders is {drill_reminders}: it must be 1 or more")
        self.drill_traces, self.drill_reminders = tuple(drill_traces), drill_reminders
        self.limit_train, self.limit_dev = limit_train, limit_dev

    def prepare_data(self) -> None:
        """Build worlds and tokenizer where they are missing (once per machine)."""
        self._worlds()
        self._dev_world()
        self._tokenizer()

    def setup(self, stage: str | None = None) -> None:
        """Read and tokenize."""
        if self.train_documents:
            return
        tokens = self.tokens = PlanTokenizer.from_pretrained(self._tokenizer())
        for split in SPLITS:
            for world in (
                self._worlds() if self.mix.get(split, 0) > 0 else ()
            ):  # one at a time, to save memory
                dialogues = repeat(read_split(world, split, "train"), self.mix[split])
                self._add(
                    self.train_documents, dialogues, tokens, f"{self.seed}/{world.name}", self.reminders
                )
        for split in ("long", "ultra"):
            for world in self._worlds() if self.mix.get("drills", 0) > 0 else ():
                dialogues = repeat(read_split(world, split, "train"), self.mix["drills"])
                for number, dialogue in enumerate(dialogues):
                    rng = random.Random(f"drills/{self.seed}/{world.name}/{dialogue.id}/{number}")
                    self.train_documents.append(
                        encode_drill(
                            dialogue,
                            tokens,
                            rng.randint(*self.drill_traces),
                            rng,
                            self.layout,
                            self.drill_reminders,
                        )
                    )
        if self.mix.get("paragraphs", 0) > 0:
            texts = [t for seed in self.seeds for t in world_text(seed, self.paragraphs_per_world)]
            self.train_documents += [
                encode_text(text, tokens, self.max_length, self.loss_on_query)
                for text in repeat(texts, self.mix["paragraphs"])
            ]
        self.train_documents = spread(self.train_documents, self.limit_train)
        dev = [d for split in ("short", "long") for d in read_split(self._dev_world(), split, "dev")]
        self._add(self.dev_documents, spread(dev, self.limit_dev), tokens)
        log.info("pretraining text: %s", describe(self.train_documents))
        log.info("development text: %s", describe(self.dev_documents))

    def _add(
        self,
        documents: list[Document],
        dialogues: list[Dialogue],
        tokens: PlanTokenizer,
        key: str = "",
        reminders: float = 0.0,
    ) -> None:
        for number, dialogue in enumerate(dialogues):
            rng = random.Random(f"reminders/{key}/{dialogue.id}/{number}")
            asked = rng if rng.random() < reminders else None
            document = encode_plain(
                dialogue,
                tokens,
                self.max_length,
                self.loss_on_query,
                self.loss_on_references,
                asked,
                self.layout,
            )
            if document is not None:
                documents.append(document)

    def _worlds(self) -> list[Path]:
        return [self.path] if self.path is not None else [_world(seed, self.questions) for seed in self.seeds]

    def _dev_world(self) -> Path:
        return self.path if self.path is not None else default_world()

    def _tokenizer(self) -> Path:
        if self.tokenizer is not None:
            return Path(self.tokenizer)
        target = memory_home() / f"tokenizer-{GENERATOR_VERSION}-{self.vocab_size}"
        if not (target / "tokenizer.json").is_file():
            log.info("training a tokenizer of %s tokens into %s", f"{self.vocab_size:,}", target)
            target.parent.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(prefix=".tokenizer-", dir=target.parent))
            train_tokenizer(_tokenizer_texts(), self.vocab_size, scratch)
            shutil.rmtree(target, ignore_errors=True)
            scratch.rename(target)
        return target


def render_turn(turn: PlannedTurn, layout: Layout = "inline") -> tuple[str, str]:
    """The question's line, and the lines of its traces (in the layout `lines` a further one, `=`, ends them)."""
    plan = "".join(render_trace(trace, layout) for trace in turn.plan.traces)
    return sanitise_query(turn.question).strip() + "\n", plan + ("=\n" if layout == "lines" else "")


def render_trace(trace: TraceDraft, layout: Layout = "inline") -> str:
    """`(29) sub-question / keywords / [28]` on one line, or on four."""
    deps = "".join(f"[{dep}]" for dep in trace.deps)
    if layout == "lines":
        return f"({trace.id})\n{trace.sub_question}\n{trace.keywords}\n{deps or '-'}\n"
    return f"({trace.id}) {trace.sub_question} / {trace.keywords} / {deps}".rstrip() + "\n"


def draw_reminders(known: Sequence[Trace], most: int, rng: random.Random) -> list[tuple[str, int]]:
    """Up to `most` (phrase, trace) pairs: what "that city", said next, would mean.

    "that <type>" means the most recent of the traces whose answer it could denote (mumu-qa 4.7, ambiguity guard).
    """
    kinds = sorted({trace.type for trace in known})
    chosen = rng.sample(kinds, min(len(kinds), most))
    meant = {kind: next(t.id for t in reversed(known) if could_denote(kind, t.type)) for kind in chosen}
    return [(phrase(kind), meant[kind]) for kind in chosen]


def encode_reminders(
    reminders: Sequence[tuple[str, int]], tokens: PlanTokenizer
) -> tuple[list[int], list[float]]:
    """Ids and loss weights of lines "that city [A5]"; only the number and its bracket carry loss."""
    ids: list[int] = []
    weights: list[float] = []
    for words, number in reminders:
        line = tokens.encode_text(f"{words} [A{number}]\n")
        known = len(tokens.encode_text(f"{words} [A"))
        ids += line
        weights += [0.0] * known + [1.0] * (len(line) - known)
    return ids, weights


def encode_drill(
    dialogue: Dialogue,
    tokens: PlanTokenizer,
    length: int,
    rng: random.Random,
    layout: Layout = "inline",
    reminders: int = 3,
) -> Document:
    """`length` successive traces of a dialogue, up to `reminders` reminders after each."""
    first = rng.randrange(max(1, len(dialogue.traces) - length))
    traces = dialogue.traces[first : first + length]
    ids, weights = [tokens.bos_id], [0.0]
    for n, trace in enumerate(traces, start=1):
        line = tokens.encode_text(render_trace(draft(trace), layout))
        reminder_ids, reminder_weights = encode_reminders(draw_reminders(traces[:n], reminders, rng), tokens)
        ids += line + reminder_ids
        weights += [0.0] * len(line) + reminder_weights
    return Document.of(ids, weights, 0)


def encode_plain(
    dialogue: Dialogue,
    tokens: PlanTokenizer,
    max_length: int,
    query_weight: float,
    reference_weight: float = 1.0,
    reminders: random.Random | None = None,
    layout: Layout = "inline",
) -> Document | None:
    """The longest prefix of whole turns within `max_length` as plain text; None where not one turn fits.

    reminders: draws those that follow about half of the turns; none without it.
    """
    ids, weights, plan_tokens = [tokens.bos_id], [0.0], 0
    known: list[Trace] = []
    for turn, planned in zip(dialogue.turns, planned_turns(dialogue), strict=True):
        question_text, plan_text = render_turn(planned, layout)
        question, plan = tokens.encode_text(question_text), tokens.encode_text(plan_text)
        plan_weights = weigh_references(plan_text, plan, tokens, turn.traces[0].id, reference_weight)
        known += turn.traces
        extra: list[int] = []
        extra_weights: list[float] = []
        if reminders is not None:
            drawn = draw_reminders(known, reminders.choice((0, 0, 0, 1, 2, 3)), reminders)
            extra, extra_weights = encode_reminders(drawn, tokens)
        if len(ids) + len(question) + len(plan) + len(extra) > max_length:
            break
        ids += question + plan + extra
        weights += [query_weight] * len(question) + plan_weights + extra_weights
        plan_tokens += len(plan)
    return Document.of(ids, weights, plan_tokens) if plan_tokens else None


def weigh_references(
    text: str, ids: Sequence[int], tokens: PlanTokenizer, first_id: int, weight: float
) -> list[float]:
    """A weight for each token of the text of a plan: `weight` where it writes the number of an earlier turn's trace."""
    if weight == 1.0:
        return [1.0] * len(ids)
    numbers = [m.span(1) for m in _REFERENCE.finditer(text.encode()) if int(m.group(1)) < first_id]
    weights, start = [], 0
    for index in ids:
        end = start + len(tokens.token_bytes[index])
        weights.append(weight if any(a < end and start < b for a, b in numbers) else 1.0)
        start = end
    return weights


def encode_text(text: str, tokens: PlanTokenizer, max_length: int, weight: float) -> Document:
    """A paragraph, cut at `max_length` tokens."""
    ids = [tokens.bos_id, *tokens.encode_text(text)][:max_length]
    return Document.of(ids, [weight] * len(ids), 0)


def repeat(items: list, passes: float) -> list:
    """`passes` passes over the items: whole ones, then evenly spread ones for the rest."""
    whole = int(passes)
    rest = round((passes - whole) * len(items))
    return items * whole + (spread(items, rest) if rest else [])


def _world(seed: int, questions: int) -> Path:
    """A world for training text: plans only matter, so it is built without distractor paragraphs."""
    target = memory_home() / f"pretrain-{GENERATOR_VERSION}-{seed}-{questions}"
    if not (target / "world.json").is_file():
        log.info("building a world of %s questions (seed %d) in %s", f"{questions:,}", seed, target)
        build_world(target, seed, questions, dev_questions=max(20, questions // 10), paragraphs=False)
    return target


def _tokenizer_texts() -> Iterator[str]:
    """Texts of worlds nobody trains or is evaluated on, and the numbers and brackets of rendered plans."""
    yield from world_corpus()
    for number in range(1, 300):
        yield f"({number}) / [{number}]\n[A{number}]"
