"""Dialogues of a built MuMu directory as training data of the trace generator (curriculum stages 1 to 3).

In:  DIR/{stage1,short,long}/{train,dev}.jsonl (formats.md "built MuMu directory") and the generator's tokenizer.
Out: packed batches with loss on plan tokens. CMT-RAG 3.3 and B.3; node limits 64 (stage 2) and 128 (stage 3).

Stage 1 reads single turns, stage 2 short dialogues, stage 3 long ones plus a replay of stage-2 training dialogues
drawn with seed 42, as many as 20 % of the long dialogues. A dialogue over the node limit or the token length is cut
at a turn border; how many were cut is logged.

A document is `[bos] query_1 \\n [PLAN]…[/PLAN] query_2 \\n [PLAN]…[/PLAN] …` (inference/tokens.py).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from datamodules.mumu import Dialogue, Trace, load_dialogues
from datamodules.packed_data import PackedData, PlannedTurn, check_positive, describe, log, spread
from datamodules.packing import Document
from inference.tokens import PlanTokenizer
from inference.traces import TraceDraft, TracePlan

SPLIT_OF_STAGE = {1: "stage1", 2: "short", 3: "long"}
NODE_LIMIT = {1: None, 2: 64, 3: 128}


class TraceData(PackedData):
    """Training and development dialogues of one curriculum stage.

    Args:
        stage: 1 (single turns), 2 (short dialogues) or 3 (long dialogues with replay).
        path: a built MuMu directory; null is the embedded world, built on first use.
        batch_size: dialogues in a batch of one process.
        val_batch_size: dialogues in a validation batch.
        max_length: tokens of a dialogue; a longer one is cut at a turn border.
        node_limit: traces of a dialogue; null takes 64 for stage 2 and 128 for stage 3.
        loss_on_query: weight of the user's words in the loss: false (0), true (1) or a number.
        loss_on_trace_id: weight of a trace's own number: false (0), true (1) or a number. The automaton writes it, so
            by default it carries none; a policy that is to write valid plans without the automaton needs it.
        ultra: stage 3: read ultra/train beside long/train (the embedded world has it; the paper has long ones only).
        replay_fraction: stage 3: short dialogues replayed, as a share of the long ones.
        replay_seed: which ones.
        limit_train: use only this many training dialogues (spread evenly).
        limit_dev: use only this many development dialogues.
        seed: order of the training dialogues, together with the epoch.
        max_row_tokens: split a packed batch into rows of at most this many tokens (null: one row).
    """

    def __init__(
        self,
        stage: int,
        path: str | None = None,
        batch_size: int = 8,
        val_batch_size: int = 16,
        max_length: int = 4096,
        node_limit: int | None = None,
        loss_on_query: bool | float = False,
        loss_on_trace_id: bool | float = False,
        ultra: bool = False,
        replay_fraction: float = 0.2,
        replay_seed: int = 42,
        limit_train: int | None = None,
        limit_dev: int | None = None,
        seed: int = 42,
        max_row_tokens: int | None = None,
    ) -> None:
        super().__init__(batch_size, val_batch_size, seed, max_row_tokens)
        if stage not in SPLIT_OF_STAGE:
            raise ValueError(f"data.stage is {stage}: it is 1, 2 or 3")
        if path is not None and not Path(path).is_dir():
            raise FileNotFoundError(
                f"data.path {path} is not a directory. Build one from MuSiQue files with "
                f"`python -m datamodules.mumu --train FILE --dev FILE --out {path}`, or leave data.path out for the "
                "embedded world"
            )
        check_positive(
            max_length=max_length, node_limit=node_limit, limit_train=limit_train, limit_dev=limit_dev
        )
        if not replay_fraction >= 0:
            raise ValueError(f"data.replay_fraction is {replay_fraction}: it must be 0 or more")
        self.stage = stage
        self.path = Path(path) if path is not None else None
        self.max_length = max_length
        self.node_limit = node_limit if node_limit is not None else NODE_LIMIT[stage]
        self.loss_on_query = float(loss_on_query)
        self.loss_on_trace_id = float(loss_on_trace_id)
        if ultra and stage != 3:
            raise ValueError("data.ultra goes with stage 3 only")
        self.ultra = ultra
        self.replay_fraction = replay_fraction
        self.replay_seed = replay_seed
        self.limit_train, self.limit_dev = limit_train, limit_dev

    def prepare_data(self) -> None:
        """Build the embedded world where it is asked for and absent (once per machine)."""
        if self.path is None:
            _default_world()

    def setup(self, stage: str | None = None) -> None:
        """Read, cut and tokenize the dialogues with the tokenizer of the trainer's module (`module.tokens`)."""
        if self.train_documents or self.dev_documents:
            return
        if self.tokens is None:
            self.tokens = self.trainer.lightning_module.tokens  # type: ignore[union-attr, assignment]
        root = self.path or _default_world()
        split = SPLIT_OF_STAGE[self.stage]
        dev = spread(read_split(root, split, "dev"), self.limit_dev)
        train = read_split(root, split, "train")
        replayed = 0
        if self.stage == 3:
            replay = draw_replay(
                read_split(root, "short", "train"), len(train), self.replay_fraction, self.replay_seed
            )
            replayed = len(replay)
            train = train + replay + (read_split(root, "ultra", "train") if self.ultra else [])
        train = spread(train, self.limit_train)
        self.train_documents, _, cut = self._encode(train)
        self.dev_documents, self.dev_turns, dev_cut = self._encode(dev)
        for name, documents, n_cut in (
            ("train", self.train_documents, cut),
            ("dev", self.dev_documents, dev_cut),
        ):
            replay_note = f", {replayed:,} replayed from short/train" if name == "train" and replayed else ""
            log.info(
                "%s/%s: %s%s%s",
                split,
                name,
                describe(documents),
                replay_note,
                f"; {n_cut:,} cut" if n_cut else "",
            )
        if not self.train_documents or not self.dev_documents:
            raise ValueError(
                f"{root / split}: no dialogue fits within {self.max_length} tokens and {self.node_limit} traces "
                "(data.max_length, data.node_limit)"
            )

    def _encode(self, dialogues: Sequence[Dialogue]) -> tuple[list[Document], list[list[PlannedTurn]], int]:
        """Documents, the turns they hold, and how many dialogues were cut (or dropped, where no turn fits)."""
        assert self.tokens is not None
        documents, kept, cut = [], [], 0
        for dialogue in dialogues:
            turns = planned_turns(dialogue)
            document, n = encode_dialogue(
                turns,
                self.tokens,
                self.max_length,
                self.node_limit,
                self.loss_on_query,
                self.loss_on_trace_id,
            )
            cut += n < len(turns)
            if document is not None:
                documents.append(document)
                kept.append(turns[:n])
        return documents, kept, cut


def read_split(root: Path, split: str, part: str) -> list[Dialogue]:
    """The dialogues of one file. FileNotFoundError names it and what to do."""
    file = root / split / f"{part}.jsonl"
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} does not exist: {root} is not a built MuMu directory, or its source could not fill this split "
            f"(see {root / 'manifest.json'}). Build one with `python -m datamodules.mumu` or `datamodules.world`"
        )
    return load_dialogues(file)


def planned_turns(dialogue: Dialogue) -> list[PlannedTurn]:
    """Questions and gold plans of a dialogue, in order."""
    return [PlannedTurn(turn.question, TracePlan(tuple(map(draft, turn.traces)))) for turn in dialogue.turns]


def draft(trace: Trace) -> TraceDraft:
    """What the generator writes of a trace."""
    return TraceDraft(trace.id, trace.sub_question, trace.keywords, trace.deps)


def encode_dialogue(
    turns: Sequence[PlannedTurn],
    tokens: PlanTokenizer,
    max_length: int,
    node_limit: int | None = None,
    loss_on_query: float = 0.0,
    loss_on_trace_id: float = 0.0,
) -> tuple[Document | None, int]:
    """The longest prefix of whole turns within both limits, as a document; None where not even one turn fits.

    Plan tokens weigh 1, a trace's own identifier `loss_on_trace_id` (the decoder writes it), the query `loss_on_query`.
    """
    ids, weights, plan_tokens = [tokens.bos_id], [0.0], 0
    nodes = kept = 0
    for turn in turns:
        query = tokens.encode_query(turn.question)
        plan, carries = tokens.encode_plan(turn.plan)
        nodes += len(turn.plan.traces)
        if len(ids) + len(query) + len(plan) > max_length or (node_limit is not None and nodes > node_limit):
            break
        ids += query + plan
        in_plan = [1.0 if loss else loss_on_trace_id for loss in carries]
        weights += [loss_on_query] * len(query) + in_plan
        plan_tokens += sum(weight > 0 for weight in in_plan)
        kept += 1
    return (Document.of(ids, weights, plan_tokens) if kept else None), kept


def draw_replay(short: Sequence[Dialogue], n_long: int, fraction: float, seed: int) -> list[Dialogue]:
    """round(fraction * n_long) distinct short dialogues (5045 -> 1009 in the paper), drawn with their own seed."""
    wanted = round(fraction * n_long)
    if wanted > len(short):
        log.warning("replay wants %d dialogues, short/train holds %d: all are replayed", wanted, len(short))
    return random.Random(seed).sample(list(short), min(wanted, len(short)))


def _default_world() -> Path:
    from datamodules.world import default_world

    return default_world()
