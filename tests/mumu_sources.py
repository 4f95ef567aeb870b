"""Random MuSiQue records for the synthesiser's tests: a small consistent world in which many questions share entities.

Every relation is a function, so the same sub-question always has the same answer and bridges occur often.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

SHAPES = {
    "2hop": [[], [1]],
    "3hop1": [[], [1], [2]],
    "3hop2": [[], [], [1, 2]],
    "4hop1": [[], [1], [2], [3]],
    "4hop2": [[], [], [1, 2], [3]],
    "4hop3": [[], [1], [], [2, 3]],
}
# (sub-question about one subject, answer type), partly relational, partly plain.
UNARY = [
    ("{} >> place of birth", "city"),
    ("{} >> spouse", "person"),
    ("{} >> record label", "company"),
    ("{} >> author", "person"),
    ("Who founded {} ?", "person"),
    ("what country is {} located in", "country"),
    ("When was {} established ?", "year"),
    ("where did {} stay", "city"),
    ("which river runs past {}", "river"),
]
BINARY = [
    ("what treaty did {} sign with {}", "treaty"),
    ("When did {} , {} and the others meet ?", "year"),
    ("Who wrote about {} and {} 's era?", "person"),
]
NAMES = {
    "city": "ville", "person": "son", "company": " Works", "country": "land", "river": " River", "treaty": " Accord"
}  # fmt: skip


def records(seed: int, count: int, world: str = "A", entities: int = 4) -> list[dict[str, Any]]:
    """`count` records of all shapes; different `world`s share no entity, sub-question or paragraph."""
    rng = random.Random(f"{seed}/{world}")
    pool = {
        kind: [f"{world}{kind[:2].title()}{n}{end}" for n in range(entities)] for kind, end in NAMES.items()
    }
    starts = [name for names in pool.values() for name in names]
    facts: dict[str, dict[str, Any]] = {}

    def fact(template: str, kind: str, subjects: list[str]) -> dict[str, Any]:
        question = template.format(*subjects)
        if question not in facts:
            own = random.Random(f"{seed}/{world}/{question}")
            answer = str(own.randint(1500, 1990)) if kind == "year" else own.choice(pool[kind])
            facts[question] = {"sid": f"{world}{len(facts)}", "answer": answer, "type": kind}
        return facts[question]

    out: list[dict[str, Any]] = []
    seen = set()
    for _ in range(count * 30):
        if len(out) == count:
            break
        shape = rng.choice(list(SHAPES))
        steps: list[dict[str, Any]] = []
        wording: list[str] = []
        for n, refs in enumerate(SHAPES[shape]):
            last = n == len(SHAPES[shape]) - 1
            choices = BINARY if len(refs) == 2 else UNARY
            template, kind = rng.choice(choices if last else [c for c in choices if c[1] != "year"])
            subjects = [steps[r - 1]["answer"] for r in refs] or [rng.choice(starts)]
            known = fact(template, kind, subjects)
            shown = [f"#{r}" for r in refs] or subjects
            inner = [f"the one of {wording[r - 1]}" for r in refs] or subjects
            wording.append(f"{template.format(*inner).rstrip(' ?')}")
            steps.append({"id": known["sid"], "question": template.format(*shown), "answer": known["answer"]})
        sids = [step["id"] for step in steps]
        gid = f"{shape}__{'_'.join(sids)}"
        if len(set(sids)) < len(sids) or gid in seen:
            continue
        seen.add(gid)
        paragraphs = [
            {
                "title": f"Page {s['id']}",
                "paragraph_text": f"Fact {s['id']}: {s['answer']}.",
                "is_supporting": True,
            }
            for s in steps
        ]
        extra = {"title": f"Noise {world}", "paragraph_text": f"Nothing {len(out)}.", "is_supporting": False}
        order = [*paragraphs, extra]
        rng.shuffle(order)
        for step, paragraph in zip(steps, paragraphs, strict=True):
            step["paragraph_support_idx"] = order.index(paragraph)
        out.append(
            {
                "id": gid,
                "question": f"Please tell: {wording[-1]}?",
                "answer": steps[-1]["answer"],
                "answer_aliases": ["alias of it"] if rng.random() < 0.3 else [],
                "answerable": True,
                "paragraphs": [{"idx": n, **p} for n, p in enumerate(order)],
                "question_decomposition": steps,
            }
        )
    return out


def write(path: Path, items: list[dict[str, Any]]) -> Path:
    """The records as JSONL."""
    path.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    return path
