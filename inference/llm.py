"""Chat completions from any OpenAI-compatible server: vLLM, llama.cpp, Ollama, OpenAI.

    LLMRequest ──► cache ──miss──► at most `concurrency` calls in flight ──► cache ──► Completion

The official `openai` client sends, times out and retries (exponential backoff with jitter, `Retry-After` honoured; only
after timeouts, lost connections and the statuses 408, 409, 429 and 5xx). This file adds what a build over thousands of
requests needs: a cache on disk, order, counts, errors of one line. Calls block; they work in any thread, also under a
running event loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import queue
import random
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import openai

from inference.llm_cache import ResponseCache
from inference.llm_messages import Completion, LLMRequest, completion, read_answer

__all__ = ["Completion", "LLMClient", "LLMError", "LLMRequest", "Usage"]

T = TypeVar("T")
Progress = Callable[[int, int], None]  # (done, total), in distinct requests
CONNECT_TIMEOUT = 10.0  # seconds
_HINTS = {
    400: "the server refuses a setting of the request, or the prompt is too long for the model",
    401: "the key is refused: set OPENAI_API_KEY",
    403: "the key is refused: set OPENAI_API_KEY",
    404: "the URL must be the API root (usually it ends in /v1) and the model one that the server serves",
    429: "the rate limit outlasted all retries: lower the concurrency, or continue later",
}


class LLMError(ConnectionError):
    """What a server, or the way to it, did wrong: one line with the URL, the status, and what to do."""

    def __init__(self, message: str, url: str, status: int | None = None):
        super().__init__(message)
        self.url, self.status = url, status


@dataclass
class Usage:
    """What this client has used: tokens and requests the server answered, repeated requests, answers from the cache."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    requests: int = 0
    retries: int = 0
    cached: int = 0


class LLMClient:
    """A client of one model at one URL. A context manager; safe to share between threads.

    url: the API root, such as `http://localhost:8000/v1` (`/v1` is added to a bare host). model: a name the server
    knows; None takes the only one it serves. api_key: default OPENAI_API_KEY; it is never shown. cache: a file, or None
    for no cache. concurrency: most requests in flight, all callers together. timeout: seconds without a byte from the
    server. retries: repetitions of a request. Raises ValueError for an unusable URL, size or cache file.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        api_key: str | None = None,
        cache: str | Path | None = None,
        concurrency: int = 32,
        timeout: float = 120.0,
        retries: int = 5,
    ):
        base, self.url, password = _read_url(url)
        if concurrency < 1 or retries < 0 or timeout <= 0:
            raise ValueError(
                "the LLM client needs a concurrency of 1 or more, 0 or more retries, and a timeout"
            )
        key = api_key or os.environ.get("OPENAI_API_KEY") or None
        self.usage = Usage()
        self._model, self._retries = model, retries
        self._secrets = [secret for secret in (key, password) if secret]
        self._cache = None if cache is None else ResponseCache(cache)
        self._api = openai.AsyncOpenAI(
            base_url=base,
            api_key=key or "none",
            timeout=openai.Timeout(timeout, connect=min(CONNECT_TIMEOUT, timeout)),
            max_retries=retries,
        )
        self._slots, self._contact, self._reached = asyncio.Semaphore(concurrency), asyncio.Lock(), False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="llm", daemon=True)
        self._thread.start()

    @property
    def model(self) -> str:
        """The name of the model. Asks the server when none was given; raises LLMError when it serves several."""
        return self._model or _wait(self._submit(self._reach()))

    def complete(self, request: LLMRequest) -> Completion:
        """The answer to one request. Raises LLMError."""
        return self.complete_many([request])[0]

    def complete_many(
        self, requests: Sequence[LLMRequest], progress: Progress | None = None
    ) -> list[Completion]:
        """The answers, in the order of the requests; equal requests are sent once.

        Each answer is in the cache as soon as it arrives, and `progress` is called here, in the caller's thread. Raises
        LLMError at the first request that fails for good; requests still under way are then dropped.
        """
        model = self.model if requests else ""
        keys = [request.key(model) for request in requests]
        distinct = dict(zip(keys, requests, strict=True))
        counts: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        future = self._submit(self._batch(model, distinct, counts.put))
        future.add_done_callback(lambda _: counts.put(None))
        try:
            while (done := counts.get()) is not None:
                if progress is not None:
                    progress(done, len(distinct))
        except BaseException:
            future.cancel()
            raise
        answers = _wait(future)
        return [answers[key] for key in keys]

    def close(self) -> None:
        """Close connections and cache. The client cannot be used afterwards."""
        if self._loop.is_closed():
            return
        _wait(self._submit(self._shut_down()))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        if self._cache is not None:
            self._cache.close()

    def __enter__(self) -> LLMClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    # What follows runs in the client's own thread.

    async def _batch(
        self, model: str, requests: Mapping[str, LLMRequest], tick: Callable[[int], None]
    ) -> dict[str, Completion]:
        answers: dict[str, Completion] = {}

        async def one(key: str, request: LLMRequest) -> None:
            answers[key] = await self._one(model, key, request)
            tick(len(answers))

        try:
            async with asyncio.TaskGroup() as group:
                for key, request in requests.items():
                    group.create_task(one(key, request))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return answers

    async def _one(self, model: str, key: str, request: LLMRequest) -> Completion:
        stored = self._cache.get(key) if self._cache is not None else None
        if stored is not None:
            self.usage.cached += 1
            return completion(stored, cached=True)
        async with self._slots:
            await self._reach()
            response = await self._ask(model, request)
        self.usage.requests += 1
        self.usage.prompt_tokens += response["prompt_tokens"]
        self.usage.completion_tokens += response["completion_tokens"]
        if self._cache is not None:
            response = self._cache.add(key, response)
        return completion(response, cached=False)

    async def _reach(self) -> str:
        """The model, after one quick call has shown that there is a server: a wrong URL must not cost all retries."""
        async with self._contact:
            if self._reached:
                return self._model or ""
            try:
                listed = await self._api.with_options(max_retries=min(self._retries, 1)).models.list()
                names = [model.id for model in listed.data or []]
            except openai.APIConnectionError as error:
                raise self._error(error) from None
            except (openai.APIError, AttributeError, ValueError) as error:
                # Not every server lists its models; the chat call will tell what is wrong, if anything is.
                if self._model is None:
                    raise LLMError(
                        f"{self.url}: the server does not list its models ({self._line(error)}); name the model",
                        self.url,
                        getattr(error, "status_code", None),
                    ) from None
                names = []
            if self._model is None:
                if len(names) != 1:
                    found = ", ".join(names[:10]) or "none"
                    raise LLMError(
                        f"{self.url}: the server has {len(names)} models ({found}); name one", self.url
                    )
                self._model = names[0]
            self._reached = True
            return self._model

    async def _ask(self, model: str, request: LLMRequest) -> dict[str, Any]:
        """The server's answer as it is stored. A body that holds no answer counts as a failure of the server."""
        for attempt in range(self._retries + 1):
            try:
                raw = await self._api.chat.completions.with_raw_response.create(
                    model=model, **request.options()
                )
            except openai.APIError as error:
                raise self._error(error) from None
            self.usage.retries += raw.retries_taken
            if (response := read_answer(raw.content)) is not None:
                return response
            kind = raw.headers.get("content-type", "no content type")
            if "json" not in kind:
                raise LLMError(
                    f"{self.url}: answers with {kind} instead of JSON; {_HINTS[404]}",
                    self.url,
                    raw.status_code,
                )
            if attempt < self._retries:
                self.usage.retries += 1
                await asyncio.sleep(min(0.5 * 2**attempt, 8.0) * random.uniform(0.75, 1.0))
        start = self._line(raw.content[:500].decode("utf-8", "replace"))
        raise LLMError(
            f"{self.url}: status {raw.status_code} without an answer, {self._retries + 1} times ({start}); "
            "see the server's log",
            self.url,
            raw.status_code,
        )

    async def _shut_down(self) -> None:
        under_way = asyncio.all_tasks() - {asyncio.current_task()}
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        await self._api.close()

    def _error(self, error: openai.APIError) -> LLMError:
        if isinstance(error, openai.APIStatusError):
            status = error.status_code
            hint = _HINTS.get(
                status, "see the server's log" if status >= 500 else "the server refuses the request"
            )
            body = error.body
            said = body.get("message", body) if isinstance(body, dict) else body or error.response.text
            return LLMError(f"{self.url}: status {status} ({self._line(said)}); {hint}", self.url, status)
        if isinstance(error, openai.APITimeoutError):
            return LLMError(
                f"{self.url}: no answer in time; see whether the server is up and not overloaded", self.url
            )
        cause = self._line(error.__cause__ or error)
        return LLMError(
            f"{self.url}: cannot be reached ({cause}); start the server there or correct the URL", self.url
        )

    def _line(self, text: object) -> str:
        """The start of a message of the server's as one line without secrets."""
        line = " ".join(str(text).split())
        for secret in self._secrets:
            line = line.replace(secret, "***")
        return line[:200]


def _wait(future: concurrent.futures.Future[T]) -> T:
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def _read_url(url: str) -> tuple[str, str, str | None]:
    """(URL to call, URL to show, password in it)."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError("the LLM URL must look like http://localhost:8000/v1, without a query")
    path = parts.path.rstrip("/") or "/v1"
    shown = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], path, "", ""))
    return urlunsplit((parts.scheme, parts.netloc, path, "", "")), shown, parts.password
