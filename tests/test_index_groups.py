"""Goal: our groups are the ones SGLang's model code builds. Method: compare with its rule, layer by layer."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hisparse.errors import ConfigError
from sglang_hisparse.index_groups import IndexGroup, index_groups

NUM_LAYERS = {"num_hidden_layers": 61}
GLM_PATTERN = "FF" + "SSSF" * 19

CONFIGS = {
    "DeepSeek-V3.2": NUM_LAYERS,
    "GLM-5.1, frequency 4": {"num_hidden_layers": 78, "index_topk_freq": 4},
    "GLM-5.2, frequency 4 after offset 3": {
        "num_hidden_layers": 78,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
    },
    "offset 1": {"num_hidden_layers": 9, "index_topk_freq": 2, "index_skip_topk_offset": 1},
    "frequency null": {"num_hidden_layers": 5, "index_topk_freq": None, "index_skip_topk_offset": None},
    "pattern": {"num_hidden_layers": 78, "index_topk_pattern": GLM_PATTERN},
    "pattern shorter than the model": {"num_hidden_layers": 12, "index_topk_pattern": "FSSF"},
    "indexer_types before pattern": {
        "num_hidden_layers": 6,
        "indexer_types": ["full", "shared", "shared", "full", "shared", "full"],
        "index_topk_pattern": "FFFFFF",
    },
    "LongCat": {"num_hidden_layers": 28, "cli_factor": 2, "index_topk_pattern": "FFFF"},
}


def sglang_groups(keys: dict) -> tuple[IndexGroup, ...]:
    """Groups by SGLang's own function: a layer that it does not skip begins a group."""
    from sglang.srt.configs.model_config import dsa_layer_skips_topk

    config = SimpleNamespace(architectures=["DeepseekV32ForCausalLM"], index_topk=2048, **keys)
    groups: list[list[int]] = []
    for layer in range(config.num_hidden_layers):
        if dsa_layer_skips_topk(config, layer):
            groups[-1].append(layer)
        else:
            groups.append([layer])
    return tuple(IndexGroup(group[0], tuple(group[1:])) for group in groups)


@pytest.mark.parametrize("keys", CONFIGS.values(), ids=CONFIGS.keys())
def test_groups_equal_those_of_sglang(keys: dict) -> None:
    """Goal: same leaders, same followers. Method: known shapes of configs, as mapping and as object, against SGLang."""
    expected = sglang_groups(keys)
    assert index_groups(keys) == expected
    assert index_groups(SimpleNamespace(**keys)) == expected


@given(
    num_layers=st.integers(1, 40),
    frequency=st.none() | st.integers(1, 7),
    offset=st.none() | st.integers(1, 9),
    pattern=st.none() | st.text("FS", max_size=40).map(lambda tail: "F" + tail),
    factor=st.none() | st.integers(1, 4),
    types=st.none() | st.lists(st.sampled_from(["full", "shared"]), max_size=40).map(lambda tail: ["full", *tail]),
)
def test_any_mixture_of_keys_follows_sglangs_precedence(num_layers, frequency, offset, pattern, factor, types) -> None:
    """Goal: precedence of the keys is SGLang's. Method: random presence and values of all five keys against it."""
    keys = {
        "num_hidden_layers": num_layers,
        "index_topk_freq": frequency,
        "index_skip_topk_offset": offset,
        "index_topk_pattern": pattern,
        "cli_factor": factor,
        "indexer_types": types,
    }
    expected = sglang_groups(keys)
    assert index_groups(keys) == expected


def test_known_shapes_by_hand() -> None:
    """Goal: the comparison above is not two equal mistakes. Method: counts and first groups worked out by hand."""
    assert index_groups(NUM_LAYERS) == tuple(IndexGroup(layer) for layer in range(61))
    groups = index_groups({"num_hidden_layers": 78, "index_topk_freq": 4, "index_skip_topk_offset": 3})
    assert groups[:4] == (IndexGroup(0), IndexGroup(1), IndexGroup(2, (3, 4, 5)), IndexGroup(6, (7, 8, 9)))
    assert len(groups) == 21
    assert groups[2].layers == (2, 3, 4, 5)


def test_every_layer_is_in_exactly_one_group() -> None:
    """Goal: no layer is lost. Method: the groups of a grouped model, one after another, are all layers in order."""
    groups = index_groups({"num_hidden_layers": 78, "index_topk_pattern": GLM_PATTERN})
    assert [layer for group in groups for layer in group.layers] == list(range(78))


def test_a_subset_of_layers_keeps_its_numbers() -> None:
    """Goal: layers without a DSA cache can be left out. Method: name the layers and look at the groups."""
    groups = index_groups({"index_topk_pattern": "FSFSFS"}, layer_ids=(0, 1, 4, 5))
    assert groups == (IndexGroup(0, (1,)), IndexGroup(4, (5,)))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_hidden_layers": 4, "index_topk_pattern": "SFFF"}, "layer 0: reuses the top-k"),
        ({"num_hidden_layers": 4, "indexer_types": ["shared"]}, "layer 0: reuses the top-k"),
        ({"num_hidden_layers": 4, "index_topk_freq": 0}, "index_topk_freq: 0"),
        ({"num_hidden_layers": 4, "index_topk_freq": 2, "index_skip_topk_offset": 0}, "index_skip_topk_offset: 0"),
        ({"num_hidden_layers": 4, "cli_factor": -1}, "cli_factor: -1"),
        ({"num_hidden_layers": 4, "index_topk_freq": "4"}, "index_topk_freq: '4'"),
        ({}, "num_hidden_layers: missing"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(keys: dict, message: str) -> None:
    """Goal: a broken model config ends before weights load. Method: one config for each contradiction."""
    with pytest.raises(ConfigError, match="^" + message.replace("(", r"\(")):
        index_groups(keys)
