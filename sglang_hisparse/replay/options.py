"""Parameters of one replay run, checked once; read by every other module of this folder."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_hisparse.errors import ConfigError
from sglang_hisparse.replay.profiles import MIX, PROFILES
from sglang_hisparse.residency import Mirroring, ResidencyLimits, ResidencyMode, ResidencyPolicy


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Defaults are a scaled-down model (a quarter of top_k and buffer) that two cores replay in under a minute."""

    profile: str = "mix"  #: name of a profile, or "mix"
    seed: int = 1
    device: str = "cpu"
    top_k: int = 512
    buffer_size: int = 1024  #: rows of one hot buffer
    row_bytes: int = 128  #: of one token in one layer
    num_groups: int = 2  #: index groups
    layers_per_group: int = 2  #: a leader and its followers
    page_size: int = 64
    device_pages: int = 640
    host_to_device_ratio: float = 3.0
    max_requests: int = 12  #: running at once
    min_context: int = 4096  #: tokens of a prompt
    max_context: int = 12288
    max_output: int = 256  #: tokens that a request decodes, at most
    scale: float = 1.0  #: multiplies the steps of every phase
    chunk_tokens: int = 4096  #: prompt tokens of one forward
    num_families: int = 3  #: shared prefixes; every second request begins with one
    residency: str = "hybrid"
    mirroring: str = "eager"
    watermark_low: float = 0.02
    watermark_high: float = 0.06
    mirror_pages_per_step: int = 64
    promote_pages_per_step: int = 32
    stream: str = ""  #: the recording that takes the place of the profile

    def __post_init__(self) -> None:
        for name in ("top_k", "num_groups", "layers_per_group", "device_pages", "max_requests", "max_output", "chunk_tokens"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        _require(self.profile == "mix" or self.profile in PROFILES, "profile", self.profile, ", ".join(["mix", *PROFILES]))
        _require(self.device == "cpu" or self.device.startswith("cuda"), "device", self.device, "cpu or cuda")
        _require(self.row_bytes >= 16 and self.row_bytes % 16 == 0, "row_bytes", self.row_bytes, "a multiple of 16")
        _require(self.page_size & (self.page_size - 1) == 0, "page_size", self.page_size, "a power of two")
        _require(self.buffer_size % self.page_size == 0, "buffer", self.buffer_size, f"a multiple of the page, {self.page_size}")
        _require(self.buffer_size >= self.top_k, "buffer", self.buffer_size, f"at least top_k, {self.top_k}")
        _require(self.host_to_device_ratio >= 1, "ratio", self.host_to_device_ratio, "at least 1")
        _require(self.page_size <= self.min_context <= self.max_context, "min_context", self.min_context, "one page to max_context")
        # One request must fit an empty pool while it is prefilled, with a hot lease to spare (I8).
        needed = self.max_pages_per_slot + self.hot_pages + int(self.watermark_high * self.device_pages) + 1
        _require(self.device_pages >= needed, "device_pages", self.device_pages, f"at least {needed} for max_context {self.max_context}")

    @property
    def hot_pages(self) -> int:
        return self.buffer_size // self.page_size

    @property
    def num_layers(self) -> int:
        return self.num_groups * self.layers_per_group

    @property
    def max_tokens(self) -> int:
        """Longest context: a re-arriving request may continue a finished one once, a step runs ahead of its results."""
        return self.max_context + 2 * self.max_output + 2

    @property
    def max_pages_per_slot(self) -> int:
        return -(-self.max_tokens // self.page_size)

    @property
    def page_bytes(self) -> int:
        """Of one page in one layer."""
        return self.page_size * self.row_bytes

    @property
    def limits(self) -> ResidencyLimits:
        return ResidencyLimits(
            num_logical_pages=int(self.host_to_device_ratio * self.device_pages),
            num_device_pages=self.device_pages,
            num_slots=self.max_requests + 1,
            max_pages_per_slot=self.max_pages_per_slot,
            hot_pages=self.hot_pages,
            page_size=self.page_size,
        )

    @property
    def policy(self) -> ResidencyPolicy:
        return ResidencyPolicy(
            mode=ResidencyMode(self.residency),
            mirroring=Mirroring(self.mirroring),
            watermark_low=self.watermark_low,
            watermark_high=self.watermark_high,
            mirror_pages_per_step=self.mirror_pages_per_step,
            promote_pages_per_step=self.promote_pages_per_step,
        )

    def profile_names(self, request: int) -> list[str]:
        """The profile of each index group of the `request`-th request."""
        names = MIX if self.profile == "mix" else (self.profile,)
        return [names[(request * self.num_groups + group) % len(names)] for group in range(self.num_groups)]


def _require(holds: bool, key: str, value: object, allowed: str) -> None:
    if not holds:
        raise ConfigError(f"replay: {key}: {value} is not allowed; {allowed}")
