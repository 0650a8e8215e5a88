"""Index groups of a model: each layer that owns an indexer (leader) with the layers that reuse its top-k (followers).

Sizing (index-K rows exist for leaders only), the hot state and the coordinator call it once at start. Pure arithmetic
on a model's text config, in the precedence in which SGLang reads the config's keys; it never looks at weights.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_hisparse.errors import ConfigError


@dataclass(frozen=True, slots=True)
class IndexGroup:
    """One leader and its followers, layer numbers ascending; the followers come directly after the leader."""

    leader: int
    followers: tuple[int, ...] = ()

    @property
    def layers(self) -> tuple[int, ...]:
        """Leader first, then the followers."""
        return (self.leader, *self.followers)


def index_groups(text_config: Any, *, layer_ids: Iterable[int] | None = None) -> tuple[IndexGroup, ...]:
    """Groups of all layers in ascending order.

    text_config: Hugging Face text config, an object or a mapping. layer_ids: the layers that have a DSA cache,
    ascending; default all of `num_hidden_layers`. Raises ConfigError where a key's value makes no sense or the first
    layer would have no top-k to reuse.
    """
    get = _reader(text_config)
    if layer_ids is None:
        num_layers = get("num_hidden_layers")
        if num_layers is None:
            raise ConfigError("num_hidden_layers: missing in the model's config; allowed: a DSA model's text config")
        layer_ids = range(int(num_layers))
    reuses = _reuse_rule(get)
    groups: list[tuple[int, list[int]]] = []
    for layer in layer_ids:
        if not reuses(layer):
            groups.append((layer, []))
        elif groups:
            groups[-1][1].append(layer)
        else:
            raise ConfigError(
                f"layer {layer}: reuses the top-k of an earlier layer and is the first; allowed: a first "
                "layer with an indexer of its own"
            )
    return tuple(IndexGroup(leader, tuple(followers)) for leader, followers in groups)


def _reader(text_config: Any) -> Callable[[str], Any]:
    if isinstance(text_config, Mapping):
        return text_config.get
    return lambda key: getattr(text_config, key, None)


def _reuse_rule(get: Callable[[str], Any]) -> Callable[[int], bool]:
    """The one rule that holds for this config: does a layer reuse the top-k of the layer before it?"""
    types = get("indexer_types")
    if types is not None:
        return lambda layer: 0 <= layer < len(types) and types[layer] == "shared"

    # One indexer for every cli_factor layers (LongCat).
    factor = _positive("cli_factor", get("cli_factor"))
    if factor > 1:
        return lambda layer: layer % factor != 0

    pattern = get("index_topk_pattern")
    if pattern is not None:
        return lambda layer: layer < len(pattern) and pattern[layer] == "S"

    # With the frequency alone, layers 0 and 1 both lead and counting starts at layer 1, as with an offset of 2.
    frequency = _positive("index_topk_freq", get("index_topk_freq"))
    offset = get("index_skip_topk_offset")
    first = 1 if offset is None else _positive("index_skip_topk_offset", offset) - 1
    return lambda layer: max(layer - first, 0) % frequency != 0


def _positive(key: str, value: Any) -> int:
    if value is None:
        return 1
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key}: {value!r} in the model's config is not a positive integer; allowed: 1 or more")
    return value
