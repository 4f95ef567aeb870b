"""Whole dialogues on which a trace generator is tested, in bins by number of turns.

In:  {short,long,ultra}/dev.jsonl of a built MuMu directory (formats.md), or a fictional world made for testing only.
Out: dialogues shared out over the processes, each with what is reported apart: bin, operator, hops, cross-turn edges.

The bins are the paper's (Table 2) with the split in their name, because short and long dialogues overlap in length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from datamodules.mumu import Dialogue
from datamodules.packed_data import PlannedTurn, check_positive, log, spread
from datamodules.traces import planned_turns, read_split

BINS = {
    "short-3-7": ("short", 3, 7),
    "long-6-15": ("long", 6, 15),
    "long-16-28": ("long", 16, 28),
    "long-29-32": ("long", 29, 32),
    "ultra-33-67": ("ultra", 33, 67),
}
WORLD_SEED = 43  # the stages train and select on world 42, the base reads worlds from 101 on
WORLD_QUESTIONS = 2000


@dataclass(frozen=True)
class HeldOutDialogue:
    """A dialogue to test on.

    Attributes:
        id: its id.
        bin: a key of BINS.
        turns: questions and gold plans.
        operators: synthesis operator of each turn.
        hops: sub-questions of each turn's gold plan.
        cross: per turn, whether its gold plan depends on an earlier turn.
    """

    id: str
    bin: str
    turns: tuple[PlannedTurn, ...]
    operators: tuple[str, ...]
    hops: tuple[int, ...]
    cross: tuple[bool, ...]


class DialogueBins(LightningDataModule):
    """Dialogues of a development split, grouped by length.

    Args:
        path: a built MuMu directory; null builds the test world (seed 43: its names occur in no training world).
        part: the file to read, `dev` or `train`.
        turns_per_bin: take dialogues, spread evenly over the file, until a bin holds this many turns; null takes all.
        batch_size: dialogues that are written side by side.
    """

    def __init__(
        self,
        path: str | None = None,
        part: str = "dev",
        turns_per_bin: int | None = None,
        batch_size: int = 32,
    ) -> None:
        super().__init__()
        if path is not None and not Path(path).is_dir():
            raise FileNotFoundError(f"data.path {path} is not a directory: name a built MuMu directory")
        if part not in ("dev", "train"):
            raise ValueError(f"data.part is {part!r}: it is dev or train")
        check_positive(turns_per_bin=turns_per_bin, batch_size=batch_size)
        self.path = Path(path) if path is not None else None
        self.part, self.turns_per_bin, self.batch_size = part, turns_per_bin, batch_size
        self.dialogues: list[HeldOutDialogue] = []

    def prepare_data(self) -> None:
        """Build the test world where it is asked for and absent (once per machine)."""
        self._root()

    def setup(self, stage: str | None = None) -> None:
        """Read the dialogues and choose those of each bin."""
        if self.dialogues:
            return
        root = self._root()
        found = {
            split: read_split(root, split, self.part)
            for split in ("short", "long", "ultra")
            if (root / split / f"{self.part}.jsonl").is_file()
        }
        for name, (split, low, high) in BINS.items():
            dialogues = [d for d in found.get(split, []) if low <= len(d.turns) <= high]
            chosen = choose_until(dialogues, self.turns_per_bin)
            self.dialogues += [held_out(d, name) for d in chosen]
            if chosen:
                turns = sum(len(d.turns) for d in chosen)
                log.info("%s: %s dialogues, %s turns", name, f"{len(chosen):,}", f"{turns:,}")
        if not self.dialogues:
            raise ValueError(
                f"{root} holds no multi-turn dialogues in {self.part}.jsonl of short/, long/ or ultra/: build it with "
                "`python -m datamodules.mumu --dev FILE`"
            )

    def test_dataloader(self) -> DataLoader:
        """Batches of dialogues of this rank, long ones first so that a batch holds similar lengths."""
        rank, world = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        ordered = sorted(self.dialogues, key=lambda d: -len(d.turns))
        return DataLoader(ordered[rank::world], batch_size=self.batch_size, collate_fn=list)  # type: ignore[arg-type]

    def _root(self) -> Path:
        if self.path is not None:
            return self.path
        from datamodules.world import MIN_QUESTIONS, default_world

        return default_world(WORLD_SEED, MIN_QUESTIONS, WORLD_QUESTIONS)


def held_out(dialogue: Dialogue, bin_name: str) -> HeldOutDialogue:
    """A built dialogue with what is reported apart."""
    first, cross = 1, []
    for turn in dialogue.turns:
        cross.append(any(dep < first for trace in turn.traces for dep in trace.deps))
        first += len(turn.traces)
    return HeldOutDialogue(
        dialogue.id,
        bin_name,
        tuple(planned_turns(dialogue)),
        tuple(turn.operator for turn in dialogue.turns),
        tuple(len(turn.traces) for turn in dialogue.turns),
        tuple(cross),
    )


def choose_until(dialogues: Sequence[Dialogue], turns: int | None) -> list[Dialogue]:
    """The fewest dialogues, spread evenly over the file, that hold `turns` turns together; all where they do not."""
    items = list(dialogues)
    if turns is None or sum(len(d.turns) for d in items) <= turns:
        return items
    low, high = 1, len(items)
    while low < high:  # an even spread of more dialogues may hold fewer turns by chance, but not of many more
        middle = (low + high) // 2
        if sum(len(d.turns) for d in spread(items, middle)) >= turns:
            high = middle
        else:
            low = middle + 1
    while sum(len(d.turns) for d in spread(items, low)) < turns:
        low += 1
    return spread(items, low)
