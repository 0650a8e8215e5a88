"""Goal: every setting is checked alone and against the model. Method: a table of texts with the exact refusal."""

import dataclasses
import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hisparse.config import (
    HiSparseConfig,
    Mirroring,
    ModelFacts,
    ResidencyMode,
    describe,
    parse_config,
    reference_markdown,
)
from sglang_hisparse.errors import ConfigError

V32 = ModelFacts(index_topk=2048, num_layers=61)
CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.json"))

REFUSED = [
    ('{"top_k": "2048"}', 'top_k: "2048" is a string; allowed: an integer >= 1 and <= 32768, or null'),
    ('{"top_k": true}', "top_k: true is a boolean; allowed: an integer >= 1 and <= 32768, or null"),
    ('{"top_k": 0}', "top_k: 0 is below 1; allowed: an integer >= 1 and <= 32768, or null"),
    (
        '{"top_k": 2048.0}',
        "top_k: 2048.0 is not written as an integer; allowed: an integer >= 1 and <= 32768, or null",
    ),
    ('{"top_k": [2048]}', "top_k: [2048] is a list; allowed: an integer >= 1 and <= 32768, or null"),
    (
        '{"device_buffer_size": 40000}',
        "device_buffer_size: 40000 is above 32768; allowed: an integer >= 1 and <= 32768, or null",
    ),
    ('{"host_to_device_ratio": 0.5}', "host_to_device_ratio: 0.5 is below 1; allowed: a number >= 1, or null"),
    ('{"host_to_device_ratio": -1}', "host_to_device_ratio: -1 is below 1; allowed: a number >= 1, or null"),
    ('{"host_to_device_ratio": true}', "host_to_device_ratio: true is a boolean; allowed: a number >= 1, or null"),
    ('{"host_to_device_ratio": "10"}', 'host_to_device_ratio: "10" is a string; allowed: a number >= 1, or null'),
    (
        '{"host_to_device_ratio": Infinity}',
        "host_to_device_ratio: Infinity is not a finite number; allowed: a number >= 1, or null",
    ),
    ('{"host_pool_gib": 0}', "host_pool_gib: 0 is not above 0; allowed: a number > 0, or null"),
    ('{"host_pool_gib": 1e999}', "host_pool_gib: Infinity is not a finite number; allowed: a number > 0, or null"),
    ('{"residency": "hybird"}', 'residency: "hybird" is not a known word; allowed: "hybrid" or "always_host"'),
    ('{"residency": null}', 'residency: null is not allowed; allowed: "hybrid" or "always_host"'),
    ('{"mirroring": 1}', 'mirroring: 1 is an integer; allowed: "eager" or "on_pressure"'),
    ('{"eviction": "score"}', 'eviction: "score" is not a known word; allowed: "lru" or "index_score"'),
    ('{"admission": "fast"}', 'admission: "fast" is not a known word; allowed: "throughput" or "latency"'),
    ('{"watermark_low": NaN}', "watermark_low: NaN is not a finite number; allowed: a number >= 0 and < 1"),
    ('{"watermark_low": -0.1}', "watermark_low: -0.1 is below 0; allowed: a number >= 0 and < 1"),
    ('{"watermark_high": 1}', "watermark_high: 1 is not below 1; allowed: a number >= 0 and < 1"),
    ('{"watermark_low": 0.5}', "watermark_low: 0.5 is above watermark_high (0.06); allowed: a number from 0 to 0.06"),
    (
        '{"watermark_high": 0.01}',
        "watermark_high: 0.01 is below watermark_low (0.02); allowed: a number from 0.02 to below 1",
    ),
    (
        '{"mirror_mib_per_step": 0}',
        "mirror_mib_per_step: 0 is below 1; allowed: an integer >= 1 and <= 1048576",
    ),
    (
        '{"promote_mib_per_step": -1}',
        "promote_mib_per_step: -1 is below 0; allowed: an integer >= 0 and <= 1048576",
    ),
    ('{"storage_backend": ""}', 'storage_backend: "" is empty; allowed: a string that is not empty, or null'),
    ('{"storage_extra_config": "x"}', 'storage_extra_config: "x" is a string; allowed: an object, or null'),
    ('{"storage_extra_config": {}}', "storage_extra_config: {} has no storage_backend to go to; allowed: null, or both keys"),
    ('{"storage_wait_seconds": -1}', "storage_wait_seconds: -1 is below 0; allowed: a number >= 0"),
    ('{"swap_in_block_size": "x"}', 'swap_in_block_size: "x" is a string; allowed: an integer >= 1, or null'),
    ('{"top_k": 1, "top_k": 2}', "top_k: 2 is given after 1; allowed: each key once"),
    (
        "[]",
        '--hisparse-config: [] is a list; allowed: a JSON object such as {"top_k": 2048, "device_buffer_size": 4096}',
    ),
]


@pytest.mark.parametrize(("text", "message"), REFUSED, ids=[text for text, _ in REFUSED])
def test_a_bad_value_is_refused_with_one_exact_line(text: str, message: str) -> None:
    """Goal: key, value and what is allowed are named. Method: the exact message of each bad text."""
    with pytest.raises(ConfigError) as caught:
        parse_config(text)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "text", ["", "   ", "{", "{'top_k': 2048}", "null", "1", '"x"', "true", "NaN", "[" * 100_000, '{"a": ' + "1" * 5000]
)
def test_text_that_is_no_object_is_refused_in_one_short_line(text: str) -> None:
    """Goal: no text ends in another exception or a long message. Method: broken, scalar, huge and deep texts."""
    with pytest.raises(ConfigError) as caught:
        parse_config(text)
    message = str(caught.value)
    assert message.startswith("--hisparse-config: ")
    assert "allowed: a JSON object such as" in message
    assert "\n" not in message and len(message) < 300


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("device_bufer_size", "device_buffer_size"),
        ("topk", "top_k"),
        ("ratio_host_to_device", None),
        ("x", None),
        ("watermark_lo", "watermark_low"),
        ("hostpool_gib", "host_pool_gib"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(key: str, near: str | None) -> None:
    """Goal: a typo is never ignored. Method: near and far keys; the hint names the near one, the list names all."""
    with pytest.raises(ConfigError) as caught:
        parse_config(json.dumps({key: 1}))
    message = str(caught.value)
    assert message.startswith(f"{key}: unknown key; ")
    if near is not None:
        assert f"did you mean {near}? " in message
    for doc in describe():
        assert doc.key in message


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=5,
    ),
    st.sampled_from([doc.key for doc in describe()]),
)
def test_any_value_of_any_key_is_accepted_in_range_or_refused_in_one_line(value: object, key: str) -> None:
    """Goal: no JSON value escapes the schema. Method: random values; an accepted one reads back as what was written."""
    try:
        config = parse_config(json.dumps({key: value}))
    except ConfigError as error:
        assert str(error).startswith(f"{key}: ") and "; allowed: " in str(error)
        assert len(str(error).splitlines()) == 1
    else:
        stored = getattr(config, key)
        assert stored == value
        assert not isinstance(value, bool)


def test_no_text_and_an_empty_object_give_the_documented_defaults() -> None:
    """Goal: defaults are what the reference says. Method: compare both texts with each other and with the values."""
    config = parse_config(None)
    assert config == parse_config("{}")
    assert (config.residency, config.mirroring) == (ResidencyMode.HYBRID, Mirroring.EAGER)
    assert (config.watermark_low, config.watermark_high) == (0.02, 0.06)
    assert (config.mirror_mib_per_step, config.promote_mib_per_step) == (256, 64)
    assert (config.top_k, config.device_buffer_size, config.host_to_device_ratio, config.host_pool_gib) == (None,) * 4


def test_every_field_of_the_schema_is_described() -> None:
    """Goal: no key without reference. Method: schema fields against the rows and the Markdown table."""
    fields = [field.name for field in msgspec.structs.fields(HiSparseConfig)]
    docs = describe()
    assert [doc.key for doc in docs] == fields
    assert all(doc.allowed and doc.default and doc.meaning for doc in docs)
    table = reference_markdown().splitlines()
    assert len(table) == len(fields) + 2
    assert {line.count(" | ") for line in table[2:]} == {4}


def test_defaults_are_filled_from_the_model() -> None:
    """Goal: resolve leaves nothing open. Method: the default config on a model with another top-k and an odd page."""
    resolved = parse_config(None).resolve(ModelFacts(index_topk=512, num_layers=8))
    assert (resolved.top_k, resolved.device_buffer_size, resolved.hot_pages) == (512, 1024, 16)
    assert resolved.mirror_bytes_per_step == 256 << 20
    assert resolved.promote_bytes_per_step == 64 << 20
    rounded = parse_config(None).resolve(ModelFacts(index_topk=500, num_layers=8, page_size=64))
    assert rounded.device_buffer_size == 1024
    verified = parse_config(None).resolve(ModelFacts(index_topk=2048, num_layers=8, verification_rows=4))
    assert verified.device_buffer_size == 8192


@pytest.mark.parametrize(
    ("text", "model", "message"),
    [
        (
            '{"top_k": 1024}',
            V32,
            "top_k: 1024 differs from the model's index_topk; allowed: 2048, or leave the key out",
        ),
        (
            '{"device_buffer_size": 1984}',
            V32,
            "device_buffer_size: 1984 is below top_k (2048); allowed: a multiple of 64 from 2048 to 32768",
        ),
        (
            '{"device_buffer_size": 4096}',
            dataclasses.replace(V32, verification_rows=4),
            ("device_buffer_size: 4096 is below top_k (2048) times 4 verification rows; "
            "allowed: a multiple of 64 from 8192 to 32768"),
        ),
        (
            '{"device_buffer_size": 2050}',
            V32,
            ("device_buffer_size: 2050 is not a multiple of the page (64 tokens); "
            "allowed: a multiple of 64 from 2048 to 32768"),
        ),
        (
            "{}",
            ModelFacts(index_topk=20000, num_layers=1),
            ("device_buffer_size: 40000 is above the 32768 slots that can be numbered; "
            "allowed: a multiple of 64 from 20032 to 32768"),
        ),
    ],
)
def test_rules_that_depend_on_the_model(text: str, model: ModelFacts, message: str) -> None:
    """Goal: the kernel never meets a size it cannot serve. Method: one refused pair for each rule, message exact."""
    with pytest.raises(ConfigError) as caught:
        parse_config(text).resolve(model)
    assert str(caught.value) == message


def test_bounds_themselves_are_accepted() -> None:
    """Goal: limits are inclusive where the reference says so. Method: each bound at its edge."""
    assert parse_config('{"device_buffer_size": 32768}').resolve(V32).hot_pages == 512
    assert parse_config('{"device_buffer_size": 2048}').resolve(V32).device_buffer_size == 2048
    assert parse_config('{"host_to_device_ratio": 1}').host_to_device_ratio == 1
    assert parse_config('{"watermark_low": 0, "watermark_high": 0}').watermark_high == 0
    assert parse_config('{"promote_mib_per_step": 0}').resolve(V32).promote_bytes_per_step == 0
    assert parse_config('{"host_to_device_ratio": 2.5}').resolve(V32).host_to_device_ratio == 2.5


def test_an_ignored_setting_leaves_a_note() -> None:
    """Goal: swap_in_block_size is accepted but not silently. Method: the notes with and without it."""
    assert parse_config("{}").notes() == ()
    (note,) = parse_config('{"swap_in_block_size": 512}').notes()
    assert note.startswith("swap_in_block_size: 512 is ignored")


def test_facts_are_read_from_an_object_or_a_mapping_and_a_dense_model_is_refused() -> None:
    """Goal: a model without an indexer never gets settings. Method: one config as mapping and as object."""
    keys = {"index_topk": 2048, "num_hidden_layers": 61}
    assert ModelFacts.from_text_config(keys) == ModelFacts.from_text_config(type("Config", (), keys)) == V32
    with pytest.raises(ConfigError, match="no index_topk"):
        ModelFacts.from_text_config({"num_hidden_layers": 61})


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_configs_parse_and_resolve(path: Path) -> None:
    """Goal: every file under configs/ works as it is. Method: parse and resolve each for a top-k of 2048."""
    resolved = parse_config(path.read_text()).resolve(V32)
    assert resolved.top_k == 2048


def test_there_are_shipped_configs() -> None:
    """Goal: the parametrised test above is not empty. Method: count the files."""
    assert len(CONFIGS) >= 3
