"""Turns worded by a language model: prompts, rules, second attempts, fallbacks, builds that survive being killed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from datamodules import mumu
from datamodules.mumu_llm import tasks_of
from datamodules.mumu_operators import original, partial, relocate, splice
from datamodules.mumu_prompts import EXPLANATIONS, PROMPTS, first_prompt, read_question, second_prompt
from datamodules.mumu_text import Wording
from inference.llm import LLMClient
from tests.llm_server import Body, Reply, ScriptedServer, failure
from tests.mumu_invariants import check_directory, rows
from tests.mumu_sources import records, write
from tests.test_mumu_operators import graph

ROOT = Path(mumu.__file__).parents[1]


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def block_of(prompt: str) -> Body:
    """The JSON input of a prompt."""
    return json.JSONDecoder().raw_decode(prompt.partition("\n\nInput:\n")[2])[0]


def good(prompt: str) -> str:
    """A question that passes every rule, and another one for every prompt."""
    block = block_of(prompt)
    if "relocated_sub_question" in block:
        relocated = block["relocated_sub_question"].replace(">>", "and the").rstrip(" ?")
        return f"Leaving aside {relocated}, {block['original_question']}"
    name = hashlib.sha256(prompt.partition("\n\nAn earlier")[0].encode()).hexdigest()[:10]
    return f"What belongs to {block.get('reference_phrase', 'a thing')} under {name}?"


def model(body: Body, number: int) -> Reply:
    """A model that wraps a good answer in thinking and prose."""
    answer = json.dumps({"question": good(body["messages"][-1]["content"])})
    return Reply(f"<think>{{}}</think>Here {{is}} one: {answer} I hope it helps.", tokens=(number % 7, 3))


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> tuple[Path, dict[str, dict[str, Body]]]:
    folder = tmp_path_factory.mktemp("sources")
    items = {"train": records(5, 60, "A", 12), "dev": records(5, 40, "B", 12)}
    for split, part in items.items():
        write(folder / f"{split}.jsonl", part)
    return folder, {split: {r["id"]: r for r in part} for split, part in items.items()}


def build(folder: Path, out: Path, url: str | None = None, **client: Any) -> Body:
    """The manifest of a build, by templates or by the model at `url`."""
    files = ([folder / "train.jsonl"], [folder / "dev.jsonl"], out)
    if url is None:
        return mumu.build(*files)
    with LLMClient(url, **client) as llm:
        return mumu.build(*files, realiser="llm", llm=llm)


def turns(out: Path) -> list[tuple[str, Body]]:
    return [
        (dialogue["id"], turn)
        for path in sorted(out.glob("*/*.jsonl"))
        for dialogue in rows(path)
        for turn in dialogue["turns"]
    ]


def without_words(turn: Body) -> Body:
    return {key: value for key, value in turn.items() if key not in ("question", "realiser")}


@pytest.fixture(scope="module")
def template(sources, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("template") / "out"
    build(sources[0], out)
    return out


def test_a_model_words_every_turn_and_changes_nothing_else(sources, template, tmp_path):
    out, seen = tmp_path / "out", []
    with ScriptedServer(model) as server, LLMClient(server.url) as llm:
        files = ([sources[0] / "train.jsonl"], [sources[0] / "dev.jsonl"], out)
        manifest = mumu.build(*files, realiser="llm", llm=llm, report=lambda *told: seen.append(told))
    check_directory(out, sources[1])
    plain = json.loads((template / "manifest.json").read_text())
    part = manifest.pop("realisation")
    assert {**manifest, "realiser": "template"} == plain and "realisation" not in plain
    assert (out / "corpus.jsonl").read_bytes() == (template / "corpus.jsonl").read_bytes()
    ours, theirs = turns(out), turns(template)
    assert [(i, without_words(t)) for i, t in ours] == [(i, without_words(t)) for i, t in theirs]
    counts = {"llm": 0, "original": 0}
    for (_, turn), (_, before) in zip(ours, theirs, strict=True):
        counts[turn["realiser"]] += 1
        assert (turn["question"] == before["question"]) == (turn["operator"] == "ORIG")
        assert (turn["realiser"] == "original") == (turn["operator"] == "ORIG")
    assert part["turns"] == counts
    sent = [body for _, body, _ in server.posts]
    assert part["requests"] == part["distinct_turns"] == len(sent) == len({json.dumps(b) for b in sent})
    assert counts["llm"] > len(sent) > 20  # a turn that occurs in several dialogues is worded once
    assert part["rejections"] == {"attempt 1": {}, "attempt 2": {}, "dialogue": {}}
    assert part["tokens"] == {"prompt": sum(n % 7 for n in range(len(sent))), "completion": 3 * len(sent)}
    assert part["model"] == "tiny" and part["temperature"] == 0.2 and part["max_tokens"] == 220
    assert part["prompts"]["A"] == hashlib.sha256(PROMPTS["A"].encode()).hexdigest()
    progress = [told[1:] for told in seen if told[0] == "word turns, attempt 1"]
    assert progress == [(n, len(sent)) for n in range(1, len(sent) + 1)]


def test_what_the_model_is_given(sources, tmp_path):
    with ScriptedServer(model) as server:
        build(sources[0], tmp_path / "out", server.url)
    letters = dict.fromkeys("ABC", 0)
    by_answer = {turn["answer"] for _, turn in turns(tmp_path / "out")}
    for _, body, _ in server.posts:
        assert body["temperature"] == 0.2 and body["max_tokens"] == 220 and body["model"] == "tiny"
        assert body["chat_template_kwargs"] == {"enable_thinking": False} and "response_format" not in body
        (message,) = body["messages"]
        prompt, block = message["content"], block_of(message["content"])
        (letter,) = [x for x in PROMPTS if prompt.startswith(PROMPTS[x])]
        letters[letter] += 1
        final = "final_answer" if letter == "C" else "target_answer"
        assert block[final] == block["steps"][-1]["answer"] and block[final] in by_answer
        assert ("relocated_sub_question" in block) == (letter == "B")
        assert ("previous_answer" in block) == ("reference_phrase" in block)
        assert (
            ("previous_answer" in block)
            if letter == "C"
            else (letter == "B" or "previous_answer" not in block)
        )
        assert [step["n"] for step in block["steps"]] == list(range(1, len(block["steps"]) + 1))
        for step in block["steps"]:
            assert all(int(k) < step["n"] for k in re.findall(r"#(\d+)", step["sub_question"]))
        assert "[A" not in prompt
    assert all(count > 3 for count in letters.values())


def test_prompts_of_a_dialogue_by_hand():
    """A partial graph, a splice, and a relocation into the spliced turn."""
    first = graph(
        "g1", ("Green >> performer", "Ann Lee"), ("#1 >> spouse", "Bo Ray"), question="Ann's spouse?"
    )
    second = graph(
        "g2", ("Blue >> performer", "Ann Lee"), ("where was #1 born", "Rome"), question="Blue's place?"
    )
    third = graph("g3", ("Red Tower >> country", "Peru"), ("who leads #1", "Cy Dow"), question="Red's head?")
    opening = partial(first, 0, Wording())
    follow = splice((opening,), opening.traces[0], second, 0, Wording())
    (task_a, task_c) = tasks_of((opening, follow))
    assert block_of(task_a.prompt) == {
        "original_question": "Ann's spouse?", "target_answer": "Ann Lee",
        "steps": [{"n": 1, "sub_question": "Green >> performer", "answer": "Ann Lee"}],
    }  # fmt: skip
    assert task_a.prompt.startswith(PROMPTS["A"])
    assert task_a.outside[0] == "Bo Ray" and task_a.hidden == ("Ann Lee",)
    assert block_of(task_c.prompt) == {
        "original_question": "Blue's place?", "final_answer": "Rome", "previous_answer": "Ann Lee",
        "reference_phrase": "that person",
        "steps": [{"n": 1, "sub_question": "where was that person born", "answer": "Rome"}],
    }  # fmt: skip
    assert task_c.phrase == "that person" and task_c.hidden == ("Rome", "alias", "Ann Lee")
    whole = original(first)
    carrier, late = relocate((whole,), third, Wording())
    task_b, task_late = tasks_of((carrier, late))
    assert block_of(task_b.prompt) == {
        "original_question": "Ann's spouse?", "target_answer": "Bo Ray",
        "relocated_sub_question": "Red Tower >> country",
        "steps": [
            {"n": 1, "sub_question": "Green >> performer", "answer": "Ann Lee"},
            {"n": 2, "sub_question": "#1 >> spouse", "answer": "Bo Ray"},
        ],
    }  # fmt: skip
    assert task_b.carried == ("Red Tower >> country", "Ann's spouse?") and "Peru" in task_b.hidden
    assert task_late.prompt.startswith(PROMPTS["C"]) and task_late.phrase == "that country"
    assert tasks_of((whole,)) == [None]


BAD = {
    "json": "no JSON here" + "{" * 10_000,
    "R2": '{"question": "Was ANSWER the one meant by PHRASE?"}',
    "R1": '{"question": "Where did she go after this?"}',
    "R5": '{"question": "' + "word after word " * 250 + '?"}',
    "R4": '{"question": "What belongs to PHRASE under #1 or so?"}',
}


@pytest.mark.parametrize("rule", BAD)
def test_a_rejected_answer_is_asked_for_once_more_with_the_reason(rule, sources, tmp_path):
    """The model errs on follow-ups: always on those whose prompt hashes even, only at first on the others."""

    def errs(body: Body, number: int) -> Reply:
        prompt = body["messages"][-1]["content"]
        first, _, again = prompt.partition("\n\nAn earlier")
        block = block_of(prompt)
        stubborn = hashlib.sha256(first.encode()).digest()[0] % 2 == 0
        if "final_answer" not in block or (again and not stubborn):
            return model(body, number)
        text = BAD[rule].replace("ANSWER", block["final_answer"]).replace("PHRASE", block["reference_phrase"])
        return Reply(text)

    out = tmp_path / "out"
    with ScriptedServer(errs) as server:
        part = build(sources[0], out, server.url)["realisation"]
    check_directory(out, sources[1])
    firsts = [p for p in server.prompts if "An earlier attempt" not in p]
    seconds = [p for p in server.prompts if "An earlier attempt" in p]
    follow_ups = [p for p in firsts if "final_answer" in block_of(p)]
    assert sorted(p.partition("\n\nAn earlier")[0] for p in seconds) == sorted(follow_ups)
    assert all(f"- {rule}: {EXPLANATIONS[rule]}" in p for p in seconds) and max(map(len, seconds)) < 5000
    stubborn = [p for p in follow_ups if hashlib.sha256(p.encode()).digest()[0] % 2 == 0]
    assert 3 < len(stubborn) < len(follow_ups)
    assert part["rejections"]["attempt 1"][rule] == len(follow_ups)
    assert part["rejections"]["attempt 2"][rule] == len(stubborn)
    assert part["requests"] == len(firsts) + len(seconds) and part["distinct_turns"] == len(firsts)
    realisers = {turn["realiser"] for _, turn in turns(out) if turn["operator"] in ("GS_C", "SQR_C")}
    assert realisers == {"llm", "template"}
    assert part["turns"]["template"] > 0


def test_a_server_in_trouble_changes_nothing(sources, tmp_path):
    """Every kind of passing failure on the way, and the same bytes as from a healthy server."""
    trouble = {
        3: failure(500), 7: failure(429, headers={"Retry-After": "0.3"}), 11: Reply(drop=True),
        15: Reply(body=b'{"choices": []}'), 19: Reply(body=b"{"), 23: Reply("late", delay=1.5),
    }  # fmt: skip

    def fixed(body: Body, number: int) -> Reply:
        return Reply(json.dumps({"question": good(body["messages"][-1]["content"])}))

    with ScriptedServer(fixed) as server:
        build(sources[0], tmp_path / "healthy", server.url)
    with ScriptedServer(lambda body, n: trouble.get(n) or fixed(body, n)) as server:
        build(sources[0], tmp_path / "troubled", server.url, timeout=1.0)
    assert len(server.posts) >= len({json.dumps(b) for _, b, _ in server.posts}) + len(trouble)
    assert contents(tmp_path / "healthy") == contents(tmp_path / "troubled")


def test_a_question_that_a_dialogue_has_already_stays_the_templates(sources, template, tmp_path):
    """The model says the same of every "that city": only the first of a dialogue is taken (R11)."""

    def monotonous(body: Body, number: int) -> Reply:
        block = block_of(body["messages"][-1]["content"])
        if "final_answer" not in block:
            return Reply("{}")
        return Reply(json.dumps({"question": f"What is there to say about {block['reference_phrase']}?"}))

    out = tmp_path / "out"
    with ScriptedServer(monotonous) as server:
        part = build(sources[0], out, server.url)["realisation"]
    check_directory(out, sources[1])
    repeated = 0
    for path in sorted(out.glob("*/*.jsonl")):
        for dialogue, before in zip(rows(path), rows(template / path.relative_to(out)), strict=True):
            questions = [turn["question"] for turn in dialogue["turns"]]
            assert len(set(questions)) == len(questions)
            said = [t["reference_phrase"] for t in dialogue["turns"] if t["operator"] in ("GS_C", "SQR_C")]
            repeated += len(said) - len(set(said))
            for turn, old in zip(dialogue["turns"], before["turns"], strict=True):
                assert turn["question"] == old["question"] or turn["realiser"] == "llm"
    assert part["rejections"]["dialogue"] == {"R11": repeated} and repeated > 5


def contents(out: Path) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in sorted(out.rglob("*")) if p.is_file()}


def command(folder: Path, out: Path, url: str, *options: str) -> list[str]:
    files = ["--train", str(folder / "train.jsonl"), "--dev", str(folder / "dev.jsonl"), "--out", str(out)]
    llm = ["--realiser", "llm", "--llm-url", url, "--llm-concurrency", "4", *options]
    return [sys.executable, "-m", "datamodules.mumu", *files, *llm]


def test_killed_and_resumed_gives_the_same_bytes(sources, tmp_path):
    """SIGKILL in the middle of the calls; the resumed build asks only for what is missing. Then without any server."""
    folder, key = sources[0], "sk-very-secret"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENAI_API_KEY": key}
    environment["TRACE_MEMORY_HOME"] = str(tmp_path / "home")

    def half_bad(body: Body, number: int) -> Reply:
        prompt = body["messages"][-1]["content"]
        bad = hashlib.sha256(prompt.encode()).digest()[0] % 3 == 0
        return (
            Reply("nothing", delay=0.01) if bad else Reply(json.dumps({"question": good(prompt)}), delay=0.01)
        )

    with ScriptedServer(half_bad) as server:
        assert mumu_main(folder, tmp_path / "whole", server.url, tmp_path / "other-cache") == 0
        needed = len(server.posts)
    with ScriptedServer(half_bad) as server:
        child = subprocess.Popen(command(folder, tmp_path / "out", server.url), env=environment, cwd=tmp_path)
        deadline = time.monotonic() + 60
        while len(server.posts) < needed // 3 and time.monotonic() < deadline:
            time.sleep(0.005)
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL and not (tmp_path / "out").exists()
        killed_at = len(server.posts)
        assert needed // 3 <= killed_at < needed
        done = subprocess.run(
            command(folder, tmp_path / "out", server.url), env=environment, cwd=tmp_path, capture_output=True, text=True
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert needed <= len(server.posts) <= needed + 4  # what was in flight is asked for again
        assert all(headers["authorization"] == f"Bearer {key}" for _, _, headers in server.posts)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert (tmp_path / "home" / "llm-cache.sqlite").is_file()
    again = mumu_main(folder, tmp_path / "again", server.url, tmp_path / "home" / "llm-cache.sqlite")
    assert again == 0 and contents(tmp_path / "again") == contents(tmp_path / "whole")
    written = b"".join(p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())
    assert key.encode() not in written and key not in done.stdout + done.stderr
    assert b"127.0.0.1" not in (tmp_path / "out" / "manifest.json").read_bytes()


def mumu_main(folder: Path, out: Path, url: str, cache: Path) -> int:
    return mumu.main(command(folder, out, url, "--llm-model", "tiny", "--llm-cache", str(cache))[3:])


def test_a_server_that_cannot_be_used_is_one_line(sources, tmp_path, capsys):
    with ScriptedServer(model, ("one", "two")) as server:
        assert mumu.main(command(sources[0], tmp_path / "out", server.url)[3:]) == 2
        assert "the server has 2 models (one, two); name one" in " ".join(capsys.readouterr().err.split())
    start = time.perf_counter()
    assert mumu_main(sources[0], tmp_path / "out", server.url, tmp_path / "cache") == 2
    error = capsys.readouterr().err
    assert "cannot be reached" in error and "Traceback" not in error and time.perf_counter() - start < 10
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("answer", "question"),
    [
        ('{"question": " Who? "}', "Who?"),
        ('Sure!\n```json\n{"question": "Who?"}\n```', "Who?"),
        ('{"note": 1} {"question": "Who?"} {"question": "What?"}', "Who?"),
        ('{"outer": {"question": "Who?"}}', "Who?"),
        ('{"question": 3}', None),
        ('{"question": "Who?"', None),
        ("['question']", None),
        ("", None),
        ("{" * 1_000_000, None),
        ('{"a":' * 100_000, None),
    ],
)  # fmt: skip
def test_the_question_in_an_answer(answer, question):
    assert read_question(answer) == question


def test_prompts_hold_what_the_paper_asks_for():
    for letter, text in PROMPTS.items():
        assert 'Return JSON only: {"question": "..."}' in text and "It contains no answer of any step" in text
        assert ("target_answer" in text) == (letter in "AB") and ("final_answer" in text) == (letter == "C")
    assert set(EXPLANATIONS) == {"json", *(f"R{n}" for n in range(1, 13))}
    first = first_prompt("A", {"original_question": "Où?"})
    again = second_prompt(first, "Bad {thing} \ud800?", ["R2", "R5"])
    assert "Où?" in first and again.startswith(first) and again.encode()
    assert f"- R2: {EXPLANATIONS['R2']}\n- R5: {EXPLANATIONS['R5']}" in again
