"""The client of OpenAI-compatible servers, against a scripted server: what it sends, repeats, stores, and says."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from inference.llm import LLMClient, LLMError, LLMRequest
from inference.llm_cache import ResponseCache
from inference.llm_messages import strip_thinking
from tests.llm_server import Reply, ScriptedServer, failure

SCHEMA = {"type": "object", "properties": {"answer": {"type": "string"}}}


@pytest.fixture(autouse=True)
def _no_key(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def ask(text: str, **options: Any) -> LLMRequest:
    return LLMRequest([{"role": "user", "content": text}], **options)


def echo(body: dict[str, Any], number: int) -> Reply:
    return Reply(f"re: {body['messages'][-1]['content']}")


def script(*replies: Reply):
    """The given replies in order, then the last one again."""
    return lambda body, number: replies[min(number, len(replies) - 1)]


def test_what_is_sent():
    with ScriptedServer(echo) as server, LLMClient(server.url, "m", api_key="sk-1") as client:
        assert (
            client.complete(ask("hi", temperature=0.2, max_tokens=7, schema=SCHEMA, thinking=False)).text
            == "re: hi"
        )
        client.complete(ask("plain"))
    (_, body, headers), (_, plain, _) = server.posts
    assert body == {
        "model": "m", "messages": [{"role": "user", "content": "hi"}], "temperature": 0.2, "max_tokens": 7,
        "response_format": {
            "type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}
        },
        "chat_template_kwargs": {"enable_thinking": False},
    }  # fmt: skip
    assert headers["authorization"] == "Bearer sk-1"
    assert set(plain) == {"model", "messages", "temperature", "max_tokens"}


def test_the_only_model_is_found_and_several_are_an_error(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-env")
    with ScriptedServer(echo, ("only",)) as server, LLMClient(server.url.removesuffix("/v1")) as client:
        assert client.model == "only" and client.complete(ask("a")).text == "re: a"
    assert server.posts[0][1]["model"] == "only" and server.gets == ["/v1/models"]
    assert server.posts[0][2]["authorization"] == "Bearer sk-env"
    for models, found in ((("x", "y"), r"2 models \(x, y\); name one"), ((), r"0 models \(none\)")):
        with ScriptedServer(echo, models) as server, LLMClient(server.url) as client:
            with pytest.raises(LLMError, match=found):
                client.complete(ask("a"))
        assert server.posts == []


def test_order_is_kept_and_equal_requests_are_sent_once():
    """Answers come back in another order than asked: the first takes longest."""

    def slow_first(body: dict[str, Any], number: int) -> Reply:
        text = body["messages"][-1]["content"]
        return Reply(f"re: {text}", delay=0.2 if text == "0" else 0.0)

    seen: list[tuple[int, int]] = []
    with ScriptedServer(slow_first) as server, LLMClient(server.url, "m") as client:
        texts = [str(n % 5) for n in range(12)]
        answers = client.complete_many(
            [ask(t) for t in texts], lambda done, total: seen.append((done, total))
        )
        assert client.complete_many([]) == []
    assert [a.text for a in answers] == [f"re: {t}" for t in texts]
    assert len(server.posts) == 5 and seen == [(n, 5) for n in range(1, 6)]
    assert (client.usage.requests, client.usage.prompt_tokens, client.usage.completion_tokens) == (5, 50, 25)


def test_never_more_than_n_in_flight_and_nearly_always_n():
    """4 slots at 0.15 s: 48 requests need 1.8 s. The best of eight tries counts, because the machine may be busy."""
    best = 0.0
    for _ in range(8):
        with ScriptedServer(lambda body, n: Reply("x", delay=0.15)) as server:
            with LLMClient(server.url, "m", concurrency=4) as client:
                client.complete(ask("warm up"))
                server.busy, start = 0.0, time.perf_counter()
                halves = [[ask(f"{half}{n}") for n in range(24)] for half in "ab"]
                threads = [threading.Thread(target=client.complete_many, args=(part,)) for part in halves]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                best = max(best, server.busy / (4 * (time.perf_counter() - start)))
        assert server.peak == 4 and len(server.posts) == 49
        if best >= 0.9:
            break
    assert best >= 0.9


@pytest.mark.parametrize(
    "bad",
    [
        failure(500),
        failure(408),
        failure(409),
        Reply(drop=True),
        Reply(body=b'{"choices": []}'),
        Reply(body=b"[[[" * 10_000),
        Reply(body=b"{}"),
        Reply(body=b'{"choices": [{"message": null}]}'),
    ],
    ids=["500", "408", "409", "dropped", "no choices", "not JSON", "empty object", "no message"],
)
def test_a_passing_failure_is_repeated(bad):
    with ScriptedServer(script(bad, Reply("fine"))) as server, LLMClient(server.url, "m") as client:
        assert client.complete(ask("a")).text == "fine"
    assert len(server.posts) == 2 and (client.usage.requests, client.usage.retries) == (1, 1)
    gap = server.posts[1][0] - server.posts[0][0]
    assert 0.3 < gap < 2.0  # the first pause is 0.375 to 0.5 s


def test_retry_after_is_honoured_and_pauses_grow():
    replies = script(failure(429, headers={"Retry-After": "1.2"}), failure(503), Reply("fine"))
    with ScriptedServer(replies) as server, LLMClient(server.url, "m") as client:
        assert client.complete(ask("a")).text == "fine"
    first, second = (b[0] - a[0] for a, b in zip(server.posts, server.posts[1:], strict=False))
    assert first >= 1.2 and 0.7 < second < 2.0
    assert client.usage.retries == 2


def test_a_silent_server_times_out():
    replies = script(Reply("late", delay=1.0), Reply("fine"))
    with ScriptedServer(replies) as server, LLMClient(server.url, "m", timeout=0.3) as client:
        assert client.complete(ask("a")).text == "fine"
    assert len(server.posts) == 2
    with ScriptedServer(script(Reply("late", delay=1.0))) as server:
        with LLMClient(server.url, "m", timeout=0.2, retries=0) as client:
            with pytest.raises(LLMError, match="no answer in time; see whether the server is up"):
                client.complete(ask("a"))


@pytest.mark.parametrize(
    ("reply", "status", "said"),
    [
        (failure(401, "bad key sk-secret"), 401, r"status 401 \(bad key \*\*\*\); .*OPENAI_API_KEY"),
        (failure(404, "no\nmodel"), 404, r"status 404 \(no model\); the URL must be the API root"),
        (failure(400, "x" * 5000), 400, r"status 400 \(x{200}\); the server refuses a setting"),
        (failure(422), 422, r"status 422 \(broken\); the server refuses the request"),
        (Reply(body=b"<html>", kind="text/html"), 200, "answers with text/html instead of JSON"),
    ],
)  # fmt: skip
def test_a_lasting_failure_is_said_at_once_in_one_line(reply, status, said):
    with ScriptedServer(script(reply)) as server, LLMClient(server.url, "m", api_key="sk-secret") as client:
        with pytest.raises(LLMError, match=said) as error:
            client.complete(ask("a"))
    assert len(server.posts) == 1
    assert str(error.value).startswith(server.url) and "\n" not in str(error.value)
    assert error.value.status == status and error.value.url == server.url


def test_a_failure_outlasting_all_retries_ends_the_batch():
    def fails_for_two(body: dict[str, Any], number: int) -> Reply:
        return (
            failure(500, "out of memory")
            if body["messages"][-1]["content"] == "2"
            else Reply("x", delay=0.05)
        )

    with (
        ScriptedServer(fails_for_two) as server,
        LLMClient(server.url, "m", retries=1, concurrency=2) as client,
    ):
        with pytest.raises(LLMError, match=r"status 500 \(out of memory\); see the server's log"):
            client.complete_many([ask(str(n)) for n in range(200)])
        assert server.prompts.count("2") == 2 and len(server.posts) < 100
        assert client.complete(ask("after")).text == "x"
    with ScriptedServer(script(Reply(body=b'{"error": "no\\nroom"}'))) as server:
        with LLMClient(server.url, "m", retries=1) as client:
            with pytest.raises(LLMError, match=r"status 200 without an answer, 2 times \(\{\"error\""):
                client.complete(ask("a"))


def test_no_server_is_said_within_seconds():
    with ScriptedServer(echo) as server:
        url = server.url.replace("//", "//user:pass-word@")
    start = time.perf_counter()
    with LLMClient(url, "m") as client, pytest.raises(LLMError, match="cannot be reached") as error:
        client.complete_many([ask(str(n)) for n in range(100)])
    assert time.perf_counter() - start < 5
    assert "start the server there or correct the URL" in str(error.value)
    assert server.url in str(error.value) and "pass-word" not in str(error.value)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x/v1", "http://", "", "http://x/v1?key=1"])
def test_urls_that_cannot_work(url):
    with pytest.raises(ValueError, match="must look like http://localhost:8000/v1"):
        LLMClient(url)


def test_sizes_that_cannot_work():
    for bad in ({"concurrency": 0}, {"retries": -1}, {"timeout": 0}):
        with pytest.raises(ValueError, match="needs a concurrency of 1 or more"):
            LLMClient("http://x", **bad)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>hm\n</think>\n\nYes", "Yes"),
        ("hm</think>Yes", "Yes"),
        ("<think>hm", ""),
        ("<think>a</think>Yes<think>b</think> and no", "Yes and no"),
        ("Yes", "Yes"),
    ],
)
def test_thinking_text_is_dropped(text, answer):
    assert strip_thinking(text) == answer
    with ScriptedServer(script(Reply(text))) as server, LLMClient(server.url, "m") as client:
        assert client.complete(ask("a")).text == answer


def test_an_answer_that_was_all_thinking_or_is_huge():
    with ScriptedServer(script(Reply(None), Reply("x" * 5_000_000))) as server:
        with LLMClient(server.url, "m") as client:
            assert client.complete(ask("a")).text == "" and len(client.complete(ask("b")).text) == 5_000_000


def test_blocking_calls_work_under_a_running_event_loop():
    async def inside(client: LLMClient) -> str:
        return client.complete(ask("a")).text

    with ScriptedServer(echo) as server, LLMClient(server.url, "m") as client:
        assert asyncio.run(inside(client)) == "re: a"


class TestCache:
    def test_a_hit_never_calls_the_server(self, tmp_path):
        with ScriptedServer(lambda body, n: Reply(f"\ud800 answer {n}")) as server:
            with LLMClient(server.url, "m", cache=tmp_path / "a" / "cache") as client:
                first = client.complete_many([ask("a"), ask("b")])
                assert client.complete(ask("a")) == first[0] and client.usage.cached == 1
        assert len(server.posts) == 2 and not first[0].cached
        with LLMClient(server.url, "m", cache=tmp_path / "a" / "cache", api_key="sk-other") as client:
            again = client.complete_many([ask("b"), ask("a")])  # the server is gone
        assert again == first[::-1] and all(a.cached for a in again)
        assert (client.usage.requests, client.usage.prompt_tokens, client.usage.cached) == (0, 0, 2)

    def test_the_key_is_the_request(self):
        base = ask("a").key("m")
        assert (
            base
            == ask("a", temperature=0).key("m")
            == LLMRequest(({"content": "a", "role": "user"},)).key("m")
        )
        others = [
            ask("a").key("n"), ask("b").key("m"), ask("a", temperature=0.1).key("m"), ask("a", max_tokens=9).key("m"),
            ask("a", schema=SCHEMA).key("m"), ask("a", thinking=False).key("m"),
        ]  # fmt: skip
        assert len({base, *others}) == 7

    def test_no_secret_is_stored(self, tmp_path):
        with ScriptedServer(echo) as server:
            with LLMClient(server.url, "m", cache=tmp_path / "c", api_key="sk-secret") as client:
                client.complete(ask("a"))
        stored = b"".join(path.read_bytes() for path in tmp_path.iterdir())
        assert b"re: a" in stored and b"sk-secret" not in stored and b"127.0.0.1" not in stored

    def test_the_first_of_two_answers_counts(self, tmp_path):
        one, two = ResponseCache(tmp_path / "c"), ResponseCache(tmp_path / "c")
        assert one.add("k", {"text": "1"}) == {"text": "1"} == two.add("k", {"text": "2"}) == two.get("k")

    def test_files_that_cannot_be_used(self, tmp_path):
        (tmp_path / "text").write_text("not a database " * 100)
        for path in (tmp_path / "text", tmp_path, tmp_path / "text" / "below"):
            with pytest.raises(
                ValueError, match=r"cannot be used as a response cache \(.*\); name another file"
            ):
                LLMClient("http://x", cache=path)
        assert (tmp_path / "text").read_text().startswith("not a database")

    def test_kill_in_the_middle_loses_nothing_that_was_answered(self, tmp_path):
        """A process killed with SIGKILL while storing; a torn tail is then added to the log by hand."""
        code = (
            "import sys; from inference.llm import LLMClient, LLMRequest\n"
            "client = LLMClient(sys.argv[1], 'm', cache=sys.argv[2], concurrency=4)\n"
            "client.complete_many([LLMRequest([{'role': 'user', 'content': str(n)}]) for n in range(500)],\n"
            "                     lambda done, total: print(done, flush=True))\n"
        )
        cache = tmp_path / "cache"
        with ScriptedServer(lambda body, n: Reply(body["messages"][-1]["content"], delay=0.005)) as server:
            child = subprocess.Popen(
                [sys.executable, "-c", code, server.url, str(cache)],
                cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True, env={**os.environ},
            )  # fmt: skip
            assert child.stdout is not None
            told = 0
            while told < 40:
                told = int(child.stdout.readline())
            child.send_signal(signal.SIGKILL)
            child.wait()
            log = Path(f"{cache}-wal")
            assert log.is_file()
            log.write_bytes(log.read_bytes() + b"\x00torn" * 100)
            sent = len(server.posts)
            assert sent < 500
            with LLMClient(server.url, "m", cache=cache, concurrency=4) as client:
                answers = client.complete_many([ask(str(n)) for n in range(500)])
        assert [a.text for a in answers] == [str(n) for n in range(500)]
        assert client.usage.cached >= told and client.usage.requests == 500 - client.usage.cached
        assert len(server.posts) - sent == client.usage.requests
        stored = sqlite3.connect(cache).execute("SELECT response FROM responses").fetchall()
        assert len(stored) == 500 and all(json.loads(text)["prompt_tokens"] == 10 for (text,) in stored)
