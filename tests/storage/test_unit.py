"""Goal: a unit is accepted if it is exactly what was asked for. Method: random units, each changed in every way that counts."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from sglang_hisparse.storage import unit as unit_module
from sglang_hisparse.storage.unit import HEADER_BYTES, UnitFormat, fingerprint_of

FORMAT = UnitFormat(fingerprint_of({"model": "m", "layers": 3}), kv_bytes=3 * 64 * 128, index_bytes=2 * 64 * 132)
HASH, OTHER = "ab" * 32, "cd" * 32


def sealed(seed: int = 0, page_hash: str = HASH, form: UnitFormat = FORMAT) -> np.ndarray:
    unit = np.random.default_rng(seed).integers(0, 256, form.num_bytes, dtype=np.uint8)
    form.seal(unit, page_hash)
    return unit


@given(st.integers(0, 2**32))
def test_a_sealed_unit_is_accepted_and_keeps_its_parts(seed: int) -> None:
    """Goal: sealing writes the header alone. Method: the parts before and after, and a second reader."""
    unit = sealed(seed)
    before = np.random.default_rng(seed).integers(0, 256, FORMAT.num_bytes, dtype=np.uint8)
    assert FORMAT.problem(unit, HASH) is None
    assert np.array_equal(FORMAT.kv(unit), FORMAT.kv(before)) and np.array_equal(
        FORMAT.index(unit), FORMAT.index(before)
    )
    assert len(FORMAT.kv(unit)) + len(FORMAT.index(unit)) + HEADER_BYTES == FORMAT.num_bytes


@given(st.integers(0, FORMAT.num_bytes - 1), st.integers(1, 255))
def test_every_byte_counts(offset: int, change: int) -> None:
    """Goal: no damage passes. Method: change any one byte; only the header's unused end may differ."""
    unit = sealed()
    unit[offset] ^= change
    assert (FORMAT.problem(unit, HASH) is None) == (112 <= offset < HEADER_BYTES)


@pytest.mark.parametrize(
    ("offset", "name"),
    [
        (0, "magic"),
        (8, "version"),
        (12, "header"),
        (16, "KV bytes"),
        (24, "index-K bytes"),
        (32, "fingerprint"),
        (64, "page hash"),
        (96, "checksum"),
        (HEADER_BYTES, "checksum"),
        (-1, "checksum"),
    ],
)
def test_a_refusal_names_the_field(offset: int, name: str) -> None:
    """Goal: the log says what is wrong. Method: flip a bit of each field."""
    unit = sealed()
    unit[offset] ^= 1
    assert FORMAT.problem(unit, HASH) == name


def test_whole_units_of_others_are_refused() -> None:
    """Goal: valid is not enough. Method: another page's unit, another model's, and one without index-K."""
    other = UnitFormat(fingerprint_of({"model": "n", "layers": 3}), FORMAT.kv_bytes, FORMAT.index_bytes)
    assert FORMAT.problem(sealed(page_hash=OTHER), HASH) == "page hash"
    assert FORMAT.problem(sealed(form=other), HASH) == "fingerprint"
    without = UnitFormat(FORMAT.fingerprint, FORMAT.kv_bytes, 0)
    padded = np.zeros(FORMAT.num_bytes, dtype=np.uint8)
    padded[: without.num_bytes] = sealed(form=without)
    assert FORMAT.problem(padded, HASH) == "index-K bytes"
    assert FORMAT.key(HASH) != other.key(HASH) and FORMAT.key(HASH) != FORMAT.key(OTHER)


def test_the_format_is_as_documented() -> None:
    """Goal: another program can read a unit by FORMAT.md. Method: take the offsets from its table and decode a unit with them."""
    text = (Path(unit_module.__file__).parent / "FORMAT.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (\d+) \| ([^|,]+)", text, flags=re.MULTILINE)
    at = {name.strip(): (int(offset), int(size)) for offset, size, name in rows}
    unit = sealed().tobytes()

    def field(name: str) -> bytes:
        offset, size = at[name]
        return unit[offset : offset + size]

    assert field("magic") == b"HISPARSE"
    assert int.from_bytes(field("format version"), "little") == unit_module.FORMAT_VERSION
    assert int.from_bytes(field("header bytes"), "little") == HEADER_BYTES
    assert int.from_bytes(field("KV bytes"), "little") == FORMAT.kv_bytes
    assert int.from_bytes(field("index-K bytes"), "little") == FORMAT.index_bytes
    assert field("fingerprint of model") == FORMAT.fingerprint and field("page hash").hex() == HASH
    assert field("checksum") == xxhash.xxh3_128(unit[:96] + unit[HEADER_BYTES:]).digest()
    assert FORMAT.key(HASH) == f"hisparse-{FORMAT.fingerprint.hex()[:16]}-{HASH}"
