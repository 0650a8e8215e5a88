"""The plan of a deployment: memory of one rank, requests that fit, bytes over the link, the settings that follow.

Called by the command `plan` and by plots.py. The figures of a server at start come from the same functions (capacity.py,
layout.py, the kernels' own state size), so a plan and the table in the server's log agree where their inputs do. It asks
neither GPU nor host: all sizes are given to it. Figures that are estimates say so in their name or beside them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from sglang_hisparse.capacity import (
    MOST_SLOTS,
    PrefillRule,
    decide_plan,
    decoding_pages,
    host_share_bytes,
    hot_shape,
    longest_pages,
    longest_request_tokens,
    request_slots,
    scratch_tokens,
)
from sglang_hisparse.config import GIB, Eviction, HiSparseConfig
from sglang_hisparse.elastic_layout import untried_obstacle
from sglang_hisparse.errors import ConfigError
from sglang_hisparse.layout import MemoryPlan, least_device_tokens, pages_for
from sglang_hisparse.planning.model_shapes import CacheType, ModelShape
from sglang_hisparse.residency import BorderStep

HOST_RESERVE_BYTES = 10 * GIB
"""What SGLang leaves free on every machine when it sizes pinned pools."""

LINK_GBPS = {CacheType.BF16: 47.0, CacheType.FP8: 43.0}
"""Scattered rows read from pinned memory by a kernel, measured on one H200 (PCIe Gen5 x16, 55 GB/s for a large copy)."""

CHUNK_TOKENS = 8192
"""SGLang's own --chunked-prefill-size on GPUs of this size: what a streamed prefill takes at a time."""

HOST_SHARE = 0.95
"""A ratio is chosen for this share of the host memory named: a server refuses to start where a little less is free."""

NARROW_BUFFER = 1.25
"""Hot buffer in units of top-k for requests that the default, twice top-k, leaves nothing to give back: with 4,000 tokens it gave 1.15 to
1.5 times the default's throughput (scripts/results/serving_grid_small_buffers_h200.json)."""

RATIO_STEP = 0.05
SLOT_STEP = 8


@dataclass(frozen=True, slots=True)
class Deployment:
    """Machines and parallelism.

    gpus: all of them; tp: ranks of one server, dp of which have an attention (and a cache) of their own, so that tp/dp
    ranks hold the same cache. gpus/tp servers run side by side. host_bytes: free memory of one machine with
    gpus_per_host GPUs. overhead_bytes: CUDA context and communicators, an estimate. weight_bytes: of one rank, as
    measured, None: estimate them. max_running_requests: the server's flag, None: choose it.
    """

    gpus: int = 8
    tp: int = 8
    dp: int = 1
    gpu_bytes: int = int(139.8 * GIB)
    gpus_per_host: int = 8
    host_bytes: int = 1024 * GIB
    mem_fraction: float = 0.85
    overhead_bytes: int = int(1.5 * GIB)
    weight_bytes: int | None = None
    max_running_requests: int | None = None

    def __post_init__(self) -> None:
        for key, value, unit in (("--tp", self.tp, self.gpus), ("--dp", self.dp, self.tp)):
            if unit % value:
                raise ConfigError(f"{key}: {value} does not divide {unit}; allowed: a divisor of {unit}")

    @property
    def caches(self) -> int:
        """Caches that hold different requests."""
        return self.gpus // self.tp * self.dp

    @property
    def ranks_per_host(self) -> int:
        return min(self.gpus, self.gpus_per_host)

    @property
    def slots_per_cache(self) -> int | None:
        """--max-running-requests as each attention rank gets it."""
        return None if self.max_running_requests is None else max(1, self.max_running_requests // self.dp)


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one length. wanted: how many at once, None: as many as fit."""

    prompt_tokens: int = 32768
    output_tokens: int = 8192
    wanted: int | None = None

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Choices:
    """Settings that are given, None: choose. elastic: `elastic_border`; None is decided as in a server whose driver can move memory."""

    cache_type: CacheType = CacheType.FP8
    ratio: float | None = None
    buffer_rows: int | None = None
    host_pool_gib: float | None = None
    link_gbps: float | None = None
    miss_rates: tuple[float, ...] = (0.067, 0.134, 0.3)
    eviction: Eviction = Eviction.LRU
    elastic: bool | None = None


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """GPU memory of one rank. cache: what a server finds for KV, index-K and metadata."""

    total: int
    overhead: int
    slack: int  #: outside --mem-fraction-static: activations, graphs
    weights: int
    weights_estimated: bool
    cache: int


@dataclass(frozen=True, slots=True)
class Fit:
    """Requests at once, each at its full length. bound: what keeps one more out."""

    mode: str
    per_cache: int
    total: int
    bound: str


@dataclass(frozen=True, slots=True)
class LinkTime:
    """Bytes from the host in one decode step of one rank, and their time.

    exposed_ms: nothing overlaps, as in this version. followers_hidden_ms: with the rows of follower layers hidden behind
    compute; a lower bound. ahead_above_ms: step time of a full plain batch above which this batch makes more tokens a
    second, if batches of both sizes take equally long but for the link; None where it is no larger than plain's.
    """

    miss_rate: float
    requests: int
    step_bytes: int
    exposed_ms: float
    followers_hidden_ms: float
    ahead_above_ms: float | None


@dataclass(frozen=True, slots=True)
class Planned:
    """Everything that is known about one deployment, model and load."""

    model: ModelShape
    deployment: Deployment
    load: Load
    choices: Choices
    device: DeviceBytes
    host_bytes_per_rank: int
    memory: MemoryPlan
    plain: Fit
    hisparse: tuple[Fit, ...]  #: full, mixed, none
    longest_request_tokens: int
    shortest_gain_tokens: int  #: shorter requests give nothing back by leaving the GPU
    link: tuple[LinkTime, ...]
    narrowed: bool = False  #: the hot buffer is smaller than the default, with which HiSparse would bring nothing

    @property
    def full(self) -> Fit:
        return self.hisparse[0]

    @property
    def mixed(self) -> Fit:
        return self.hisparse[1]


def device_bytes(model: ModelShape, deployment: Deployment) -> DeviceBytes:
    """How one GPU is divided before the cache is. Raises ConfigError where the weights leave nothing."""
    weights = deployment.weight_bytes
    if weights is None:
        weights = model.weight_bytes(tp=deployment.tp, dp=deployment.dp)
    if weights is None:
        raise ConfigError("--weights-gib: the model's config does not tell its weights; allowed: GiB of one rank")
    free = deployment.gpu_bytes - deployment.overhead_bytes
    slack = int(free * (1 - deployment.mem_fraction))
    cache = free - slack - weights
    if cache <= 0:
        raise ConfigError(
            f"--gpus: {weights / GIB:.1f} GiB of weights per GPU do not fit {(free - slack) / GIB:.1f} GiB (memory "
            f"fraction {deployment.mem_fraction:g}); allowed: more GPUs, a larger --tp, or a larger --mem-fraction"
        )
    return DeviceBytes(
        total=deployment.gpu_bytes,
        overhead=deployment.overhead_bytes,
        slack=slack,
        weights=weights,
        weights_estimated=deployment.weight_bytes is None,
        cache=cache,
    )


def memory_plan(
    model: ModelShape, deployment: Deployment, choices: Choices, cache_bytes: int, ratio: float | None
) -> MemoryPlan:
    """The plan that a server makes of `cache_bytes` per rank; ratio None: derived from host memory. Raises ConfigError."""
    shape = model.kv_shape(choices.cache_type)
    capacity = cache_bytes // shape.kv_token_bytes
    num_slots = request_slots(capacity, model.context_tokens, deployment.slots_per_cache)
    resolved = HiSparseConfig(device_buffer_size=choices.buffer_rows, eviction=choices.eviction).resolve(model.facts)
    cap = choices.host_pool_gib
    return decide_plan(
        shape,
        hot_shape(num_slots, shape.num_leaders, resolved, longest_pages(model.context_tokens, shape)),
        device_bytes=cache_bytes,
        host_bytes=host_share_bytes(deployment.host_bytes, HOST_RESERVE_BYTES, deployment.ranks_per_host),
        ranks=deployment.ranks_per_host,
        ratio=ratio,
        host_pool_bytes=None if cap is None else int(cap * GIB),
        scratch_tokens=scratch_tokens(shape, cache_bytes, model.context_tokens, None),
        elastic=choices.elastic,
        obstacle=untried_obstacle(deployment.tp, choices.elastic),
    )


def fits(memory: MemoryPlan, load: Load, caches: int) -> tuple[Fit, ...]:
    """Requests of `load` that run at once: plain, then full, mixed and none.

    plain and full: every page on the GPU. mixed: admission's own sum, one prompt being prefilled beside requests that
    have shrunk to hot lease, tail and a page. none: no prefill at all, as where prefixes are found on the host. Each with the
    border where most of them fit, if it moves; prompts are as long as they may be wherever it stands.
    """
    page = memory.shape.page_size
    total, prompt = pages_for(load.total_tokens, page), pages_for(load.prompt_tokens, page)
    smallest = least_device_tokens(memory.shape, memory.hot) // page
    device, tokens = _places(memory)
    tokens //= total
    rule = PrefillRule(
        num_device_pages=memory.least_device_tokens // page,
        hot_pages=memory.hot.lease_pages(page),
        smallest_pages=smallest,
        scratch_pages=memory.scratch_tokens // page,
        chunk_pages=pages_for(CHUNK_TOKENS, page),
    )
    decoding = decoding_pages(total, smallest)
    prefill = rule.decide(prompt, total, extend_tokens=load.prompt_tokens).pages
    slots = memory.hot.num_slots - 1
    too_long = load.total_tokens > longest_request_tokens(
        memory.least_device_tokens, memory.logical_tokens, page, memory.scratch_tokens
    )

    def fit(mode: str, pages: np.ndarray, why: str) -> Fit:
        place = int(np.argmax(np.minimum(pages, tokens)))
        limits = [(int(pages[place]), why), (slots, "request slots")]
        if mode != "plain":
            limits.insert(1, (int(tokens[place]), "tokens (index-K on the GPU, rows on the host)"))
        count, bound = min(limits, key=lambda limit: limit[0])
        if mode != "plain" and too_long:
            count, bound = 0, "one request fits neither the GPU's pages nor the scratch while it is prefilled"
        return Fit(mode, count, count * caches, bound)

    mixed = np.where(prefill <= device, 1 + (device - prefill) // decoding, 0)
    return (
        fit("plain", np.full_like(device, memory.plain_tokens // page // total), "GPU pages"),
        fit("full", device // total, "GPU pages"),
        fit("mixed", mixed, "GPU pages for hot buffers"),
        fit("none", device // decoding, "GPU pages for hot buffers"),
    )


def _places(memory: MemoryPlan) -> tuple[np.ndarray, np.ndarray]:
    """Device and logical pages, int64 each, of every place where the border may stand; one place if it does not move."""
    page = memory.shape.page_size
    steps = memory.border or (BorderStep(memory.device_tokens // page, memory.logical_tokens // page),)
    return tuple(np.array([(step.device_pages, step.logical_pages) for step in steps], dtype=np.int64).T)


def link_time(model: ModelShape, choices: Choices, miss_rate: float, requests: int, plain_requests: int) -> LinkTime:
    """One decode step of one rank with `requests`, `miss_rate` of whose selected rows come from the host."""
    shape = model.kv_shape(choices.cache_type)
    step_bytes = int(requests * model.facts.index_topk * miss_rate * shape.kv_token_bytes)
    gbps = choices.link_gbps or LINK_GBPS[choices.cache_type]
    exposed = step_bytes / gbps / 1e6
    gain = requests - plain_requests
    return LinkTime(
        miss_rate=miss_rate,
        requests=requests,
        step_bytes=step_bytes,
        exposed_ms=exposed,
        followers_hidden_ms=exposed * shape.num_leaders / shape.num_layers,
        ahead_above_ms=plain_requests * exposed / gain if gain > 0 and plain_requests else None,
    )


def candidate_ratios(most: float) -> Iterator[float]:
    """Ratios from 1 to `most` in steps, ascending, `most` included (rounded down to hundredths)."""
    for step in range(int((most - 1) / RATIO_STEP) + 1):
        yield round(1 + step * RATIO_STEP, 2)
    yield max(math.floor(most * 100) / 100, 1.0)


def choose_ratio(model: ModelShape, deployment: Deployment, load: Load, choices: Choices, cache_bytes: int) -> float:
    """The smallest ratio with which the most requests run, or all that are wanted. Raises ConfigError.

    As where a server derives it, index-K takes no more than MAX_INDEX_SHARE of the cache: beyond, almost everything that
    is read would come over the link.
    """
    thrifty = replace(deployment, host_bytes=int(deployment.host_bytes * HOST_SHARE))
    derived = memory_plan(model, thrifty, replace(choices, elastic=False), cache_bytes, None)
    best, best_count = 1.0, -1
    for ratio in candidate_ratios(derived.ratio):
        try:
            memory = memory_plan(model, deployment, choices, cache_bytes, ratio)
        except ConfigError:
            continue
        count = fits(memory, load, deployment.caches)[2].total
        if load.wanted is not None:
            count = min(count, load.wanted)
        if count > best_count:
            best, best_count = ratio, count
    return best


def choose_running(
    model: ModelShape, deployment: Deployment, load: Load, choices: Choices, cache_bytes: int
) -> Deployment:
    """`deployment` with a limit on running requests that is no narrower than memory: every slot costs hot state."""

    def limited(slots: int) -> tuple[Deployment, int]:
        limit = replace(deployment, max_running_requests=slots * deployment.dp)
        chosen = choices.ratio or choose_ratio(model, limit, load, choices, cache_bytes)
        memory = memory_plan(model, limit, choices, cache_bytes, chosen)
        return limit, max(fit.per_cache for fit in fits(memory, load, deployment.caches)[:3])

    most = MOST_SLOTS if load.wanted is None else math.ceil(load.wanted / deployment.caches)
    slots = SLOT_STEP
    limit, count = limited(slots)
    while count >= slots and slots < most:
        slots *= 2
        limit, count = limited(slots)
    tight = min(-(-max(count, 1) // SLOT_STEP) * SLOT_STEP, slots)
    return limited(tight)[0] if tight < slots else limit


def make_plan(model: ModelShape, deployment: Deployment, load: Load, choices: Choices) -> Planned:
    """Plan one deployment, choosing what is left open. Raises ConfigError with the figure that would fit.

    Hot buffers are the default's, unless those leave requests of this length nothing to give back and smaller ones do not.
    """
    planned = _plan(model, deployment, load, choices)
    if choices.buffer_rows is not None or planned.mixed.total > planned.plain.total:
        return planned
    page = planned.memory.shape.page_size
    rows = pages_for(int(NARROW_BUFFER * model.facts.index_topk), page) * page
    narrow = _plan(model, deployment, load, replace(choices, buffer_rows=rows))
    return replace(narrow, narrowed=True) if narrow.mixed.total > narrow.plain.total else planned


def _plan(model: ModelShape, deployment: Deployment, load: Load, choices: Choices) -> Planned:
    device = device_bytes(model, deployment)
    if deployment.max_running_requests is None:
        deployment = choose_running(model, deployment, load, choices, device.cache)
    if choices.ratio is None:
        choices = replace(choices, ratio=choose_ratio(model, deployment, load, choices, device.cache))
    memory = memory_plan(model, deployment, choices, device.cache, choices.ratio)
    plain, *hisparse = fits(memory, load, deployment.caches)
    mixed = hisparse[1].per_cache
    counts = sorted({1, min(plain.per_cache + 1, mixed), mixed} - {0})
    return Planned(
        model=model,
        deployment=deployment,
        load=load,
        choices=choices,
        device=device,
        host_bytes_per_rank=host_share_bytes(deployment.host_bytes, HOST_RESERVE_BYTES, deployment.ranks_per_host),
        memory=memory,
        plain=plain,
        hisparse=tuple(hisparse),
        longest_request_tokens=longest_request_tokens(
            memory.least_device_tokens, memory.logical_tokens, memory.shape.page_size, memory.scratch_tokens
        ),
        shortest_gain_tokens=least_device_tokens(memory.shape, memory.hot) + 1,
        link=tuple(
            link_time(model, choices, rate, count, plain.per_cache) for rate in choices.miss_rates for count in counts
        ),
    )
