"""A MuMu dialogue as a page to look at: `inference.dag_page` fed from a built directory.

In:  a `Dialogue` and the paragraphs of its corpus, or a built directory.
Out: one HTML file: turns, traces, arrows, evidence.

    python -m datamodules.mumu_page DIR [--split long --part dev] [--dialogue ID | --index N] [--out FILE]
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from datamodules.mumu_model import STAGE_OF, Dialogue, Turn, load_dialogues
from datamodules.musique import Paragraph
from inference.dag_page import Page, PageParagraph, PageTrace, PageTurn, render
from inference.jsonl import field, read_jsonl

OPERATOR_NAMES = {
    "ORIG": "original",
    "GS_A": "opening",
    "GS_C": "spliced",
    "SQR_B": "carrier",
    "SQR_C": "follow-up",
}
SAMPLE_ORDER = [(stage, split) for stage in ("long", "short", "stage1") for split in ("dev", "train", "tune")]


def dialogue_page(dialogue: Dialogue, corpus: Mapping[str, Paragraph]) -> str:
    """The page of one dialogue; `corpus`: paragraph id -> paragraph (one that is missing is shown by its id)."""
    wanted = dict.fromkeys(pid for trace in dialogue.traces for pid in trace.paragraph_ids)
    facts = {
        "stage": dialogue.stage,
        "split": dialogue.split,
        "seed": dialogue.seed,
        "turns": len(dialogue.turns),
        "traces": len(dialogue.traces),
        "cross-turn dependencies": dialogue.cross_turn_edges(),
    }
    page = Page(
        title=dialogue.id,
        turns=tuple(_turn(turn) for turn in dialogue.turns),
        paragraphs=tuple(PageParagraph(p.pid, p.title, p.text) for pid in wanted if (p := corpus.get(pid))),
        facts=tuple((name, str(value)) for name, value in facts.items()),
    )
    return render(page)


def sample_page(built: Mapping[tuple[str, str], Sequence[Dialogue]], corpus: Mapping[str, Paragraph]) -> str:
    """The page of the first dialogue, of the development split if it can be: long, else short, else a single turn."""
    name = next(name for name in SAMPLE_ORDER if built.get(name))
    return dialogue_page(built[name][0], corpus)


def load_paragraphs(path: Path, wanted: Iterable[str]) -> dict[str, Paragraph]:
    """The paragraphs `wanted` of a corpus file. Raises FileNotFoundError, or ValueError naming file, line, field."""
    ids, out = set(wanted), {}
    for where, record in read_jsonl(path):
        if (pid := field(record, "id", str, where)) in ids:
            out[pid] = Paragraph(pid, field(record, "title", str, where), field(record, "text", str, where))
    return out


def _turn(turn: Turn) -> PageTurn:
    labels = [OPERATOR_NAMES[turn.operator]]
    labels += [f"“{turn.reference_phrase}”"] if turn.reference_phrase else []
    labels += ["worded by a model"] if turn.realiser == "llm" else []
    labels += ["ambiguous"] if turn.ambiguous else []
    traces = tuple(
        PageTrace(t.id, t.sub_question, t.keywords, t.deps, t.answer, t.paragraph_ids, (t.type,))
        for t in turn.traces
    )
    return PageTurn(turn.question, turn.answer, traces, tuple(labels))


def _dialogues(root: Path, split: str, part: str) -> list[Dialogue]:
    if not root.is_dir():
        raise FileNotFoundError(f"{root} is not a directory; build one with `python -m datamodules.mumu`")
    path = root / split / f"{part}.jsonl"
    if not path.is_file():
        there = [f"{s}/{p.stem}" for s in STAGE_OF for p in sorted((root / s).glob("*.jsonl"))]
        if not there:
            raise FileNotFoundError(
                f"{root} holds no dialogues; build them with `python -m datamodules.mumu`"
            )
        raise FileNotFoundError(f"{root} has no {split}/{part}; it has {', '.join(there)}")
    return load_dialogues(path)


def _choose(dialogues: Sequence[Dialogue], name: str | None, index: int, where: str) -> Dialogue:
    if name is None:
        if not 0 <= index < len(dialogues):
            raise ValueError(
                f"{where} holds {len(dialogues)} dialogues; --index runs from 0 to {len(dialogues) - 1}"
            )
        return dialogues[index]
    by_id = {dialogue.id: dialogue for dialogue in dialogues}
    if name not in by_id:
        near = difflib.get_close_matches(name, by_id, n=3, cutoff=0.5) or list(by_id)[:3]
        raise ValueError(f"{where} has no dialogue '{name}'; near it: {', '.join(near)}")
    return by_id[name]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m datamodules.mumu_page", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="built by datamodules.mumu or .world")
    parser.add_argument("--split", default="long", help="stage1, short, long or ultra (default long)")
    parser.add_argument("--part", default="dev", help="train, dev or tune (default dev)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--dialogue", metavar="ID", help="a dialogue by its id")
    which.add_argument("--index", type=int, default=0, metavar="N", help="or by its line, from 0 (default 0)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: ID.html in the working directory")
    args = parser.parse_args(argv)
    try:
        dialogues = _dialogues(args.directory, args.split, args.part)
        dialogue = _choose(dialogues, args.dialogue, args.index, f"{args.split}/{args.part}")
        wanted = (pid for trace in dialogue.traces for pid in trace.paragraph_ids)
        corpus = load_paragraphs(args.directory / "corpus.jsonl", wanted)
        out = args.out or Path(f"{dialogue.id}.html")
        out.write_text(dialogue_page(dialogue, corpus), encoding="utf-8", newline="\n")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
