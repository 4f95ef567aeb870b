"""The embedded data: a fictional world in MuSiQue's format, and the multi-turn dialogues made from it.

In:  a seed and the number of questions.
Out: `source/{train,dev}.jsonl` (MuSiQue's schema, mumu-qa 4.1), the built MuMu directory of the same synthesiser that
     real MuSiQue goes through (`datamodules.mumu`), and `world.json` with the recipe.

Train and dev share no entity and no invented word, whatever the seed (see `world_names`). Everything is a function of
the arguments: the same call writes the same bytes.

    python -m datamodules.world --out DIR [--seed 42] [--questions 6000] [--dev-questions 800]
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from datamodules import mumu
from datamodules.world_facts import make_world
from datamodules.world_questions import QuestionMaker
from datamodules.world_relations import node_templates
from inference.home import memory_home

GENERATOR_VERSION = "2"
DEFAULT_QUESTIONS = 6000
DEFAULT_DEV_QUESTIONS = 800
MIN_QUESTIONS = 20

Progress = Callable[[str, int, int], None]  # (what, done, total)


def _generator(seed: int, *purpose: str) -> random.Random:
    return random.Random(f"world/{GENERATOR_VERSION}/{seed}/{'/'.join(purpose)}")


def world_records(
    split: str, seed: int = 42, questions: int = DEFAULT_QUESTIONS, paragraphs: bool = True
) -> Iterator[dict[str, Any]]:
    """Yield `questions` MuSiQue records of one split.

    Args:
        split: "train" or "dev"; the two share no name and no single-hop id.
        paragraphs: 20 paragraphs a record, or the supporting ones only (fast, for pre-training).

    Raises ValueError for a negative seed or fewer than 20 questions.
    """
    if seed < 0:
        raise ValueError(f"seed must be 0 or more, not {seed}")
    if questions < MIN_QUESTIONS:
        raise ValueError(
            f"a world of {questions} {split} questions is too small: ask for {MIN_QUESTIONS} or more"
        )
    world = make_world(_generator(seed, split, "facts"), split, size=questions // 2)
    first_sid = 1 if split == "train" else 100_000_000
    maker = QuestionMaker(world, _generator(seed, split, "questions"), first_sid, full_contexts=paragraphs)
    return maker.records(questions)


def world_text(seed: int, n: int) -> Iterator[str]:
    """Yield `n` encyclopedia paragraphs (title and text) of training worlds; names never belong to a dev split."""
    yield from _repeat(seed, n, lambda part: _paragraphs_of(seed, part))


def world_questions(seed: int, n: int) -> Iterator[str]:
    """Yield `n` texts, each a composed question followed by its sub-questions, of training worlds."""
    yield from _repeat(seed, n, lambda part: _questions_of(seed, part))


def _repeat(seed: int, n: int, make: Callable[[int], Iterator[str]]) -> Iterator[str]:
    """Worlds after worlds until `n` texts are out: small worlds, so that a text corpus holds many names."""
    part = 0
    while n > 0:
        for text in make(part):
            if n <= 0:
                break
            yield text
            n -= 1
        part += 1


def _paragraphs_of(seed: int, part: int) -> Iterator[str]:
    world = make_world(_generator(seed, "text", str(part)), "train", size=2000)
    return (f"{p.title}\n{p.text}" for p in world.paragraphs)


def _questions_of(seed: int, part: int) -> Iterator[str]:
    rng = _generator(seed, "question text", str(part))
    maker = QuestionMaker(make_world(rng, "train", size=1000), rng, 1, full_contexts=False)
    for record in maker.records(1000):
        steps = [node["question"].replace("#", "[A") for node in record["question_decomposition"]]
        yield "\n".join([record["question"], *steps])


def build_world(
    out: str | Path,
    seed: int = 42,
    questions: int = DEFAULT_QUESTIONS,
    dev_questions: int = DEFAULT_DEV_QUESTIONS,
    *,
    paragraphs: bool = True,
    sizes: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write a world directory (formats.md) and return the manifest of its dialogues.

    Args:
        out: a new or empty directory; with `overwrite`, an earlier world there is replaced. It appears only when whole.
        paragraphs: full 20-paragraph contexts, or supporting paragraphs only.
        sizes: numbers of dialogues by the names of `mumu.build` (short, long, ultra, ultra_train, …). Unlike real
            questions, a world gets ultra-long training dialogues, one for 50 questions.
        progress: called with (what, done, total) as records and dialogues are made.

    Raises ValueError for bad numbers, FileExistsError when `out` already holds something.
    """
    out = Path(out)
    _check_target(out, overwrite)
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        sources = {}
        for split, count in (("train", questions), ("dev", dev_questions)):
            records = world_records(split, seed, count, paragraphs)
            sources[split] = scratch / "source" / f"{split}.jsonl"
            _write_jsonl(sources[split], records, split, count, progress)
        manifest = mumu.build(
            [sources["train"]],
            [sources["dev"]],
            scratch,
            seed=seed,
            templates=node_templates(),
            report=progress,
            **{"ultra_train": questions // 50, **(sizes or {})},
        )
        recipe = _recipe(seed, questions, dev_questions, paragraphs)
        (scratch / "world.json").write_text(
            json.dumps(recipe, sort_keys=True, indent=1) + "\n", encoding="utf-8"
        )
        _check_target(out, overwrite)
        _move_into_place(scratch, out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return manifest


def _check_target(out: Path, overwrite: bool) -> None:
    if out.is_file():
        raise FileExistsError(f"{out} is a file; give a directory")
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not (out / "world.json").is_file():
        raise FileExistsError(f"{out} is in use and holds no world (no world.json): choose another directory")
    if not overwrite:
        raise FileExistsError(f"{out} already holds a world: choose another directory or pass --overwrite")


def _move_into_place(scratch: Path, out: Path) -> None:
    """Replace the world in `out`, if any; what else lies there stays. `world.json` comes last and says "whole"."""
    if not out.exists():
        scratch.chmod(0o755)
        scratch.rename(out)
        return
    names = sorted((entry.name for entry in scratch.iterdir()), key=lambda name: (name == "world.json", name))
    for name in reversed(names):
        if (out / name).is_dir():
            shutil.rmtree(out / name)
        else:
            (out / name).unlink(missing_ok=True)
    for name in names:
        (scratch / name).rename(out / name)


def _recipe(seed: int, questions: int, dev_questions: int, paragraphs: bool) -> dict[str, Any]:
    return {
        "schema": "world/1",
        "dialogues": mumu.SPEC_VERSION,
        "generator_version": GENERATOR_VERSION,
        "seed": seed,
        "questions": questions,
        "dev_questions": dev_questions,
        "paragraphs": paragraphs,
    }


def _write_jsonl(
    path: Path, records: Iterator[dict[str, Any]], what: str, total: int, progress: Progress | None
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for done, record in enumerate(records, start=1):
            file.write(json.dumps(record, ensure_ascii=False, sort_keys=True) + "\n")
            if progress and (done % 100 == 0 or done == total):
                progress(what, done, total)


def default_world(
    seed: int = 42,
    questions: int = DEFAULT_QUESTIONS,
    dev_questions: int = DEFAULT_DEV_QUESTIONS,
    progress: Progress | None = None,
) -> Path:
    """The directory of the sample world, built on first use and re-used while its recipe is the current one.

    A build goes to a temporary directory that is renamed at the end: an interrupted one leaves nothing behind, and of
    two processes that build at once one wins and both get a whole world.
    """
    name = f"world-{seed}" if (questions, dev_questions) == (DEFAULT_QUESTIONS, DEFAULT_DEV_QUESTIONS) else (
        f"world-{seed}-{questions}-{dev_questions}"
    )  # fmt: skip
    target = memory_home() / name
    recipe = _recipe(seed, questions, dev_questions, paragraphs=True)
    if _holds(target, recipe):
        return target
    if target.is_dir() and not (target / "world.json").is_file():
        shutil.rmtree(target)  # what an interrupted replacement left
    try:
        build_world(target, seed, questions, dev_questions, overwrite=True, progress=progress)
    except OSError:
        # Another process may have finished first; its world is the same.
        if not _holds(target, recipe):
            raise
    return target


def _holds(directory: Path, recipe: dict[str, Any]) -> bool:
    try:
        return json.loads((directory / "world.json").read_text(encoding="utf-8")) == recipe
    except (OSError, ValueError):
        return False


def main(argv: list[str] | None = None) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    parser = argparse.ArgumentParser(
        prog="python -m datamodules.world",
        description="Write a fictional world: questions and dialogues about it.",
    )
    parser.add_argument("--out", required=True, type=Path, help="directory to write")
    parser.add_argument("--seed", type=int, default=42, help="another seed, another world (default 42)")
    parser.add_argument("--questions", type=int, default=DEFAULT_QUESTIONS, help="training questions")
    parser.add_argument("--dev-questions", type=int, default=DEFAULT_DEV_QUESTIONS, help="held-out questions")
    parser.add_argument(
        "--no-paragraphs", action="store_true", help="supporting paragraphs only, no distractors"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a world that is already there")
    args = parser.parse_args(argv)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console) as bar:
            tasks: dict[str, Any] = {}

            def progress(what: str, done: int, total: int) -> None:
                if what not in tasks:
                    tasks[what] = bar.add_task(what, total=total)
                bar.update(tasks[what], completed=done, total=total)

            build_world(
                args.out, args.seed, args.questions, args.dev_questions,
                paragraphs=not args.no_paragraphs, overwrite=args.overwrite, progress=progress,
            )  # fmt: skip
    except (ValueError, OSError) as error:
        console.print(f"error: {error}", style="bold red", highlight=False, markup=False)
        return 2
    console.print(f"wrote {args.out}: source/, dialogues and corpus.jsonl", highlight=False, markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
