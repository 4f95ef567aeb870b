"""Text and plans as token ids, and back, for any byte-level BPE tokenizer of Hugging Face.

In: a fast tokenizer (GPT-NeoX, SmolLM2, Qwen, or the project's own). Out: ids of queries and plans, the mask of
tokens that carry loss, and the bytes of every token for the grammar (CMT-RAG B.1: structural tokens are added to
the vocabulary before fine-tuning).

Free text never turns into a structural or any other added token, whatever it contains: it is encoded by a copy of the
tokenizer that knows no added tokens and has neither normaliser nor prefix space, so ids give back the very same text.

A dialogue is `bos query_1 \\n [PLAN]…[/PLAN] query_2 \\n [PLAN]…[/PLAN] …` (TEMPLATE_VERSION "1").
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from inference.traces import (
    DEP,
    END_PLAN,
    END_TRACE,
    KW,
    PLAN,
    STRUCTURAL_TOKENS,
    SUBQ,
    TRACE,
    PlanParseError,
    TracePlan,
    assemble,
    check_plan,
    sanitise_query,
)

TEMPLATE_VERSION = "1"


class PlanTokenizer:
    """Wraps a fast tokenizer. `extend()` must have run once (or the tokenizer been saved after it) to encode plans.

    Raises ValueError where the tokenizer is not a byte-level BPE, since only that gives back any text exactly.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise ValueError(
                f"{type(tokenizer).__name__} is not a fast tokenizer: a tokenizer.json is needed"
            )
        self.tokenizer = tokenizer
        self._plain = _plain_backend(tokenizer.backend_tokenizer)

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> Self:
        """Load `tokenizer.json` (and `tokenizer_config.json`) from a local directory."""
        path = Path(directory)
        if not (path / "tokenizer.json").is_file():
            raise FileNotFoundError(
                f"{path / 'tokenizer.json'} does not exist: no tokenizer to load from {path}"
            )
        if not {"model", "added_tokens"} <= _read_json(path / "tokenizer.json").keys():
            raise ValueError(
                f"{path / 'tokenizer.json'} is not a tokenizer of Hugging Face: no model or added_tokens"
            )
        if (path / "tokenizer_config.json").is_file():
            _read_json(path / "tokenizer_config.json")
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True)
        try:
            return cls(tokenizer)
        except ValueError as error:
            raise ValueError(f"{path / 'tokenizer.json'}: {error}") from None

    def save(self, directory: str | Path) -> None:
        """Write the tokenizer, structural tokens included, as plain `transformers` reads it."""
        self.tokenizer.save_pretrained(str(directory))

    def extend(self) -> Self:
        """Add the structural tokens that are missing, as special tokens. Calling it again changes nothing."""
        known = self.tokenizer.get_added_vocab()
        missing = [token for token in STRUCTURAL_TOKENS if token not in known]
        if missing:
            added = [AddedToken(token, special=True, normalized=False) for token in missing]
            self.tokenizer.add_tokens(added, special_tokens=True)
            for name in ("structural", "n_tokens", "token_bytes", "_by_id", "_special_ids", "_banned_ids"):
                self.__dict__.pop(name, None)
        return self

    # -- what the vocabulary holds ------------------------------------------------------------------------------

    @cached_property
    def structural(self) -> dict[str, int]:
        """Structural token -> id, in the order of STRUCTURAL_TOKENS."""
        known = self.tokenizer.get_added_vocab()
        missing = [token for token in STRUCTURAL_TOKENS if token not in known]
        if missing:
            raise ValueError(
                f"the tokenizer lacks {', '.join(missing)}: call PlanTokenizer.extend() and save it"
            )
        return {token: known[token] for token in STRUCTURAL_TOKENS}

    @cached_property
    def n_tokens(self) -> int:
        """Ids in use: `len(tokenizer)`, or one more than the largest id where the vocabulary has holes."""
        return max(len(self.tokenizer), max(self.tokenizer.get_vocab().values()) + 1)

    @cached_property
    def token_bytes(self) -> list[bytes | str]:
        """Per id: the bytes of a text token, or the literal (a str) of an added token; holes are ""."""
        table: list[bytes | str] = [""] * self.n_tokens
        added = self.tokenizer.get_added_vocab()
        for token, index in self.tokenizer.get_vocab().items():
            if token in added or any(char not in _BYTE_OF for char in token):
                table[index] = token
            else:
                table[index] = bytes(_BYTE_OF[char] for char in token)
        return table

    @property
    def bos_id(self) -> int:
        """The id a dialogue begins with: the tokenizer's bos, else its eos."""
        for index in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id):
            if index is not None:
                return int(index)
        raise ValueError(
            "the tokenizer has neither a bos nor an eos token: a dialogue needs one to begin with"
        )

    @property
    def eos_id(self) -> int | None:
        return self.tokenizer.eos_token_id

    def fingerprint(self) -> str:
        """sha256 of tokenizer.json (without run-time padding and truncation) and the template version."""
        content = json.loads(self.tokenizer.backend_tokenizer.to_str())
        content["padding"] = content["truncation"] = None
        text = json.dumps([TEMPLATE_VERSION, content], sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()

    # -- encoding -----------------------------------------------------------------------------------------------

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text; no added token can come out. Raises ValueError if the vocabulary cannot spell it."""
        try:
            raw = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"the text {text!r} holds a lone surrogate and has no UTF-8 form") from error
        ids = self._plain.encode(text, add_special_tokens=False).ids
        if not self._banned_ids.isdisjoint(
            ids
        ):  # only where an added token is in the model's own vocabulary too
            ids = [i for part in self._cut_literals(text) for i in self._plain.encode(part).ids]
        if not self._banned_ids.isdisjoint(ids) or self._bytes(ids) != raw:
            raise ValueError(f"the tokenizer cannot spell {text!r} with text tokens alone")
        return ids

    def encode_query(self, text: str) -> list[int]:
        """The turn template: the user's words on one line, `[A12]` read as `(A12)`, then a line break."""
        readable = text.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate becomes "?"
        return self.encode_text(re.sub(r"\s*[\r\n]+\s*", " ", sanitise_query(readable)).strip() + "\n")

    def encode_plan(self, plan: TracePlan) -> tuple[list[int], list[bool]]:
        """Ids of the plan and, per id, whether it carries loss (all but the digits of a trace's own identifier)."""
        ids = [self.structural[PLAN]]
        loss = [True]

        def put(token: str, text: list[int], carries: bool = True) -> None:
            ids.extend([self.structural[token], *text])
            loss.extend([True, *([carries] * len(text))])

        for trace in plan.traces:
            put(TRACE, self.encode_text(str(trace.id)), carries=False)
            put(SUBQ, self.encode_text(trace.sub_question))
            put(KW, self.encode_text(trace.keywords))
            put(DEP, [i for dep in trace.deps for i in self.encode_text(f"[{dep}]")])
            put(END_TRACE, [])
        put(END_PLAN, [])
        return ids, loss

    # -- decoding -----------------------------------------------------------------------------------------------

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, added tokens by their literal; bytes that are not UTF-8 become U+FFFD."""
        return self._bytes(ids).decode("utf-8", "replace")

    def parse_plan(self, ids: Sequence[int], first_id: int | None = None) -> TracePlan:
        """The plan whose tokens these are; with `first_id` also `check_plan`. Raises PlanParseError."""
        fields: list[tuple[str, str]] = []
        text: list[int] = []
        names = {index: token for token, index in self.structural.items()}
        for index in ids:
            if index in names:
                fields.append((self._strict_text(text), names[index]))
                text = []
            else:
                text.append(index)
        plan = assemble(fields, self._strict_text(text))
        if first_id is not None:
            check_plan(plan, first_id)
        return plan

    # -- helpers ------------------------------------------------------------------------------------------------

    @cached_property
    def _by_id(self) -> list[bytes]:
        return [token if isinstance(token, bytes) else token.encode() for token in self.token_bytes]

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        decoder = self.tokenizer.added_tokens_decoder
        return frozenset(index for index, token in decoder.items() if token.special)

    @cached_property
    def _banned_ids(self) -> frozenset[int]:
        return frozenset(self.tokenizer.get_added_vocab().values())

    def _bytes(self, ids: Sequence[int]) -> bytes:
        table = self._by_id
        return b"".join([table[i] for i in ids])

    def _strict_text(self, ids: list[int]) -> str:
        for index in ids:
            if not 0 <= index < self.n_tokens or index in self._special_ids:
                name = self.token_bytes[index] if 0 <= index < self.n_tokens else "unused row"
                raise PlanParseError(f"token {index} ({name!s}) cannot stand inside a plan")
        try:
            return self._bytes(ids).decode("utf-8")
        except UnicodeDecodeError as error:
            raise PlanParseError(f"a field is not valid UTF-8: {self._bytes(ids)!r}") from error

    def _cut_literals(self, text: str) -> list[str]:
        """Cut every literal of an added token after its first character, so that no pre-token holds all of it."""
        literals = sorted((t for t in self.tokenizer.get_added_vocab() if len(t) > 1), key=len, reverse=True)
        pattern = re.compile("|".join(f"(?={re.escape(token)})" for token in literals))
        cuts = [0, *(match.start() + 1 for match in pattern.finditer(text)), len(text)]
        return [text[a:b] for a, b in pairwise(cuts)]


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-in of every byte in a byte-level vocabulary (the table of GPT-2): character -> byte."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()


def _plain_backend(backend: Tokenizer) -> Tokenizer:
    """A copy that encodes text exactly: no added tokens, normaliser, template, prefix space, padding or dropout."""
    spec: dict[str, Any] = json.loads(backend.to_str())
    pre: dict[str, Any] = spec.get("pre_tokenizer") or {}
    steps = pre.get("pretokenizers", [pre])
    byte_level = [step for step in steps if step.get("type") == "ByteLevel"]
    vocab = spec["model"].get("vocab", {})
    printable = [char for char, byte in _BYTE_OF.items() if 0x20 <= byte < 0x7F]
    if spec["model"].get("type") != "BPE" or not byte_level or any(char not in vocab for char in printable):
        raise ValueError(
            f"a byte-level BPE tokenizer is needed (like GPT-NeoX, SmolLM2 or Qwen); this one is "
            f"{spec['model'].get('type')} with pre-tokenizer {pre.get('type')}"
        )
    for step in byte_level:
        step["add_prefix_space"] = False
    spec |= {
        "added_tokens": [],
        "normalizer": None,
        "post_processor": None,
        "truncation": None,
        "padding": None,
    }
    spec["model"]["dropout"] = None
    return Tokenizer.from_str(json.dumps(spec))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}): the directory may be half written") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} should hold a JSON object")
    return content
