"""The schema of `--hisparse-config`: every key, its type, unit, range, default and meaning, in one place.

Validation, the command line and the start of the pool call it: `parse_config` for the text, `HiSparseConfig.resolve`
for the rules that depend on the model, `describe` for the reference table. It imports neither torch nor SGLang, reads
no memory size, and never corrects a value silently: what it cannot accept is a `ConfigError` of one line.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from sglang_hisparse.config_text import (
    KeyDoc,
    KeyText,
    allowed_by,
    convert,
    decode_object,
    key_text,
    refuse,
    shown,
    shown_key,
)
from sglang_hisparse.errors import ConfigError
from sglang_hisparse.residency.types import Mirroring, ResidencyMode

# Slot numbers of a hot buffer are 15 bits wide in the resolver's tables.
MAX_BUFFER_ROWS = 32768
DEFAULT_PAGE_SIZE = 64
MIB = 1 << 20
GIB = 1 << 30

_FLAG = "--hisparse-config"
_EXAMPLE = '{"top_k": 2048, "device_buffer_size": 4096}'


class Eviction(Enum):
    """Which rows leave a full hot buffer: those used longest ago, or those that the indexer scores lowest in this step."""

    LRU = "lru"
    INDEX_SCORE = "index_score"


class Admission(Enum):
    """What a request that only fits when pages leave the GPU waits for: nothing, or that it would not lower the throughput."""

    THROUGHPUT = "throughput"
    LATENCY = "latency"


class HiSparseConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the user wrote, checked key by key; `resolve` turns it into numbers for one model."""

    top_k: (
        Annotated[
            int,
            Meta(ge=1, le=MAX_BUFFER_ROWS),
            KeyText("rows", "rows that attention reads per query; must equal the model's index_topk", "index_topk"),
        ]
        | None
    ) = None
    device_buffer_size: (
        Annotated[
            int,
            Meta(ge=1, le=MAX_BUFFER_ROWS),
            KeyText(
                "rows",
                "hot buffer of a request whose pages are not all on the GPU; a multiple of the page, at least top_k",
                "2 * top_k",
            ),
        ]
        | None
    ) = None
    host_to_device_ratio: (
        Annotated[
            float,
            Meta(ge=1),
            KeyText(
                "logical tokens per device token",
                "tokens that the cache holds, as a multiple of those that fit on the GPU; fractions allowed",
                "what host memory allows",
            ),
        ]
        | None
    ) = None
    host_pool_gib: (
        Annotated[
            float, Meta(gt=0), KeyText("GiB per rank", "upper bound of the pinned host memory of one rank", "no bound")
        ]
        | None
    ) = None
    elastic_border: (
        Annotated[
            bool,
            KeyText(
                "",
                "begin with as many tokens on the GPU as without a host tier; memory moves from KV to index-K, 2 MiB at a time, as "
                "more tokens are cached than fit on the GPU, down to what host_to_device_ratio gives; true where that cannot be ends the start",
                "true where that can be and gains tokens, else false",
            ),
        ]
        | None
    ) = None
    residency: Annotated[
        ResidencyMode,
        KeyText(
            "",
            "`hybrid` keeps pages on the GPU while they fit; `always_host` gives them up once they are mirrored",
        ),
    ] = ResidencyMode.HYBRID
    mirroring: Annotated[
        Mirroring,
        KeyText(
            "",
            "`eager` copies a page to the host once it is full, so that spilling it later copies nothing; "
            "`on_pressure` waits until device pages run short",
        ),
    ] = Mirroring.EAGER
    eviction: Annotated[
        Eviction,
        KeyText(
            "",
            "`lru` gives up the hot rows that were used longest ago; `index_score` those that the indexer scores lowest "
            "in the same step, which misses less and takes 2 more bytes per hot row and index group",
        ),
    ] = Eviction.LRU
    admission: Annotated[
        Admission,
        KeyText(
            "",
            "a request that fits only when pages of others leave the GPU: `throughput` starts it unless the time of its "
            "fetches, as measured, would lower the tokens per second of all; `latency` starts it at once",
        ),
    ] = Admission.THROUGHPUT
    watermark_low: Annotated[
        float, Meta(ge=0, lt=1), KeyText("fraction of device pages", "pages are spilled when fewer than this are free")
    ] = 0.02
    watermark_high: Annotated[
        float,
        Meta(ge=0, lt=1),
        KeyText("fraction of device pages", "a spill goes on until this many are free; at least watermark_low"),
    ] = 0.06
    mirror_mib_per_step: Annotated[
        int, Meta(ge=1, le=1 << 20), KeyText("MiB", "most bytes mirrored to the host in one step")
    ] = 256
    promote_mib_per_step: Annotated[
        int,
        Meta(ge=0, le=1 << 20),
        KeyText("MiB", "most bytes brought back to the GPU in one step of decoding; 0 switches this off"),
    ] = 64
    prefill_scratch_tokens: (
        Annotated[
            int,
            Meta(ge=0, le=1 << 30),
            KeyText(
                "tokens",
                "longest request whose prefill may read rows from the host tier: two layers of that many rows stay "
                "reserved on the GPU; 0 switches this off, and no request may then be longer than the device pool",
                "the longest context, but at most 2 % of the cache's GPU memory",
            ),
        ]
        | None
    ) = None
    stream_extend_tokens: Annotated[
        int,
        Meta(ge=0, le=1 << 30),
        KeyText(
            "tokens",
            "a request with at most this many new tokens reads a prefix that is mostly on the host, or that others leave no "
            "room for on the GPU, from there, layer by layer; with more, the prefix is brought back to the GPU first",
        ),
    ] = 1024
    union_extend_tokens: Annotated[
        int,
        Meta(ge=0, le=1 << 30),
        KeyText(
            "tokens",
            "a forward with at most this many new tokens reads of a prefix on the host only the rows that they select, where it is "
            "expected to wait less for these than for all; 0 switches this off",
        ),
    ] = 128
    record_file: (
        Annotated[
            str,
            Meta(min_length=1),
            KeyText(
                "path",
                "record the positions that up to 4 requests at once select, to replay them later; a file of 1 GiB at most, "
                "an older one is replaced",
                "no recording",
            ),
        ]
        | None
    ) = None
    storage_backend: (
        Annotated[
            str,
            Meta(min_length=1),
            KeyText(
                "",
                "a HiCache storage backend that keeps prefixes across evictions and restarts: `file`, `seaweedfs`, or "
                "`dynamic` for a class of one's own",
                "no storage",
            ),
        ]
        | None
    ) = None
    storage_extra_config: (
        Annotated[
            dict[str, Any],
            KeyText("", "the backend's own settings, as HiCache takes them; for `file` the folder, `file_storage_path`", "none"),
        ]
        | None
    ) = None
    storage_wait_seconds: Annotated[
        float,
        Meta(ge=0),
        KeyText("s", "longest that a waiting request waits for storage; it starts with the pages that have arrived by then"),
    ] = 3.0
    swap_in_block_size: (
        Annotated[
            int, Meta(ge=1), KeyText("threads", "known to SGLang's own HiSparse; accepted here, without effect", "none")
        ]
        | None
    ) = None

    def notes(self) -> tuple[str, ...]:
        """One line for every setting that is accepted without an effect, to be logged once at start."""
        if self.swap_in_block_size is None:
            return ()
        return (f"swap_in_block_size: {self.swap_in_block_size} is ignored; the resolver chooses its own launch shape",)

    def resolve(self, model: "ModelFacts") -> "ResolvedConfig":
        """Fill the defaults that depend on the model and check the rules that do. Raises ConfigError."""
        top_k = model.index_topk if self.top_k is None else self.top_k
        if top_k != model.index_topk:
            refuse("top_k", top_k, "differs from the model's index_topk", f"{model.index_topk}, or leave the key out")
        rows = top_k * model.verification_rows
        page = model.page_size
        buffer = self.device_buffer_size
        if buffer is None:
            buffer = -(-max(2 * top_k, rows) // page) * page
        multiple = f"a multiple of {page} from {-(-rows // page) * page} to {MAX_BUFFER_ROWS // page * page}"
        if buffer < rows:
            need = f"top_k ({top_k})"
            if model.verification_rows > 1:
                need += f" times {model.verification_rows} verification rows"
            refuse("device_buffer_size", buffer, f"is below {need}", multiple)
        if buffer > MAX_BUFFER_ROWS:
            refuse("device_buffer_size", buffer, f"is above the {MAX_BUFFER_ROWS} slots that can be numbered", multiple)
        if buffer % page:
            refuse("device_buffer_size", buffer, f"is not a multiple of the page ({page} tokens)", multiple)
        return ResolvedConfig(
            top_k=top_k,
            device_buffer_size=buffer,
            page_size=page,
            host_to_device_ratio=self.host_to_device_ratio,
            host_pool_gib=self.host_pool_gib,
            elastic_border=self.elastic_border,
            residency=self.residency,
            mirroring=self.mirroring,
            eviction=self.eviction,
            admission=self.admission,
            watermark_low=self.watermark_low,
            watermark_high=self.watermark_high,
            mirror_bytes_per_step=self.mirror_mib_per_step * MIB,
            promote_bytes_per_step=self.promote_mib_per_step * MIB,
            prefill_scratch_tokens=self.prefill_scratch_tokens,
            stream_extend_tokens=self.stream_extend_tokens,
            union_extend_tokens=self.union_extend_tokens,
            record_file=self.record_file,
            storage_backend=self.storage_backend,
            storage_extra_config=self.storage_extra_config,
            storage_wait_seconds=self.storage_wait_seconds,
        )


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the settings depend on. verification_rows: query rows per request and step (1 without speculation)."""

    index_topk: int
    num_layers: int
    page_size: int = DEFAULT_PAGE_SIZE
    verification_rows: int = 1

    @classmethod
    def from_text_config(
        cls, text_config: Any, *, page_size: int = DEFAULT_PAGE_SIZE, verification_rows: int = 1
    ) -> "ModelFacts":
        """Read a Hugging Face text config (object or mapping). Raises ConfigError where it has no DSA indexer."""
        get = text_config.get if isinstance(text_config, Mapping) else lambda key: getattr(text_config, key, None)
        index_topk, num_layers = get("index_topk"), get("num_hidden_layers")
        if index_topk is None or num_layers is None:
            raise ConfigError(
                "--enable-hisparse: the model's config has no index_topk and so no DSA indexer; allowed: "
                "DSA models such as DeepSeek-V3.2 and GLM-5"
            )
        return cls(int(index_topk), int(num_layers), page_size, verification_rows)


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """Settings for one model, nothing left open but the ratio (None: derive it from host memory while sizing) and the border.

    top_k, device_buffer_size in rows; page_size in tokens; watermarks as fractions of the device pages.
    """

    top_k: int
    device_buffer_size: int
    page_size: int
    host_to_device_ratio: float | None
    host_pool_gib: float | None
    residency: ResidencyMode
    mirroring: Mirroring
    watermark_low: float
    watermark_high: float
    mirror_bytes_per_step: int
    promote_bytes_per_step: int
    record_file: str | None = None
    storage_backend: str | None = None
    storage_extra_config: Mapping[str, Any] | None = None
    storage_wait_seconds: float = 3.0
    prefill_scratch_tokens: int | None = None
    stream_extend_tokens: int = 1024
    union_extend_tokens: int = 128
    eviction: Eviction = Eviction.LRU
    admission: Admission = Admission.THROUGHPUT
    elastic_border: bool | None = None  #: None: sizing decides

    @property
    def hot_pages(self) -> int:
        """Device pages of one hot lease."""
        return self.device_buffer_size // self.page_size

    @property
    def host_pool_bytes(self) -> int | None:
        """Upper bound of pinned host memory per rank in bytes, or None."""
        return None if self.host_pool_gib is None else int(self.host_pool_gib * GIB)

    @property
    def always_host(self) -> bool:
        """Whether pages leave the GPU as soon as they are mirrored."""
        return self.residency is ResidencyMode.ALWAYS_HOST

    @property
    def eager(self) -> bool:
        """Whether pages are mirrored as soon as they are sealed."""
        return self.mirroring is Mirroring.EAGER

    @property
    def evicts_by_score(self) -> bool:
        """Whether the indexer's scores of the step say which hot rows leave."""
        return self.eviction is Eviction.INDEX_SCORE

    def summary(self) -> str:
        """One line for the log."""
        ratio = "derived from host memory" if self.host_to_device_ratio is None else f"{self.host_to_device_ratio:g}"
        cap = "" if self.host_pool_gib is None else f", at most {self.host_pool_gib:g} GiB pinned per rank"
        return (
            f"top_k {self.top_k}, hot buffer {self.device_buffer_size} rows ({self.hot_pages} pages), ratio {ratio}"
            f"{cap}, residency {self.residency.value}, mirroring {self.mirroring.value}, eviction {self.eviction.value}, "
            f"admission {self.admission.value}, watermarks {self.watermark_low:g}/{self.watermark_high:g}"
        )


# ---- parsing ---------------------------------------------------------------------------------------------------------


def parse_config(text: str | None) -> HiSparseConfig:
    """Parse the JSON text of --hisparse-config; None gives the defaults. Raises ConfigError (one line)."""
    if text is None:
        return HiSparseConfig()
    fields = {field.name: field for field in msgspec.structs.fields(HiSparseConfig)}
    values = {}
    for key, value in decode_object(text, _FLAG, _EXAMPLE).items():
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"{shown_key(key)}: unknown key; {hint}allowed: {', '.join(fields)}")
        values[key] = convert(key, value, fields[key].type)
    config = HiSparseConfig(**values)
    if config.storage_extra_config is not None and config.storage_backend is None:
        refuse("storage_extra_config", config.storage_extra_config, "has no storage_backend to go to", "null, or both keys")
    if config.watermark_low > config.watermark_high:
        if "watermark_low" in values:
            refuse(
                "watermark_low",
                config.watermark_low,
                f"is above watermark_high ({config.watermark_high:g})",
                f"a number from 0 to {config.watermark_high:g}",
            )
        refuse(
            "watermark_high",
            config.watermark_high,
            f"is below watermark_low ({config.watermark_low:g})",
            f"a number from {config.watermark_low:g} to below 1",
        )
    return config


# ---- reference -----------------------------------------------------------------------------------------------------


def describe() -> tuple[KeyDoc, ...]:
    """The reference of every key, in schema order."""
    return tuple(
        KeyDoc(
            key=field.name,
            allowed=allowed_by(field.type),
            unit=(text := key_text(field.type)).unit,
            default=text.default or shown(field.default),
            meaning=text.meaning,
        )
        for field in msgspec.structs.fields(HiSparseConfig)
    )


def reference_markdown() -> str:
    """The reference as a Markdown table, as README carries it (a test holds the two equal)."""
    lines = ["| key | allowed | unit | default | meaning |", "|---|---|---|---|---|"]
    for doc in describe():
        cells = (f"`{doc.key}`", doc.allowed.replace("|", "\\|"), doc.unit, doc.default, doc.meaning)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
