"""Goal: a page from storage is whole, this model's and of these tokens, or it is a miss: wrong bytes never reach a request.

Method: one server publishes a prompt; its files are damaged; the next server must give the right tokens (the model judges every
row and every index-K entry), use exactly the pages before the damage, and count it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

from harness.checks import assert_outputs
from harness.hisparse import finish

from sglang_hisparse.storage.unit import HEADER_BYTES

from .servers import PAGE, counts, prompt, publish, serve, server, units

PAGES = 8
PROMPT = prompt(PAGES * PAGE + 9)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Files of the prompt's pages, in the order of the pages."""
    folder = tmp_path_factory.mktemp("published")
    with server(folder) as engine:
        assert_outputs(serve(engine, [PROMPT], new=2))
        publish(engine)
        assert counts(engine)["storage_pages_published"] == PAGES
        keys = [engine.coordinator.storage.unit.key(page_hash) for page_hash in hashes_of(PROMPT)]
    files = {path.name[: len(keys[0])]: path for path in units(folder)}
    return [files[key] for key in keys]


def hashes_of(tokens: list[int]) -> list[str]:
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    return get_storage_hash_str(RadixKey(tokens[: PAGES * PAGE]), page_size=PAGE)


def copied(published: list[Path], folder: Path) -> list[Path]:
    return [Path(shutil.copy(path, folder)) for path in published]


def restarted(folder: Path, **changes: Any) -> tuple[int, dict[str, int]]:
    """Tokens of the prompt that the next server found cached, and its counts; its output is right."""
    with server(folder, **changes) as engine:
        (handle,) = serve(engine, [PROMPT], new=4)
        assert_outputs([handle])
        found = counts(engine)
        finish(engine)
    return handle.cached_tokens, found


def overwrite(path: Path, offset: int, change: Callable[[int], int] = lambda byte: byte ^ 1) -> None:
    data = bytearray(path.read_bytes())
    data[offset] = change(data[offset])
    path.write_bytes(data)


@pytest.mark.parametrize(
    "offset", [HEADER_BYTES, HEADER_BYTES + 30_000, -1, -4000], ids=["kv", "kv-later", "index-k", "index-k-earlier"]
)
def test_one_wrong_bit_ends_the_prefix(published: list[Path], tmp_path: Path, offset: int) -> None:
    """Goal: the checksum covers KV and index-K. Method: flip a bit of the sixth page."""
    overwrite(copied(published, tmp_path)[5], offset)
    cached, found = restarted(tmp_path)
    assert cached == 5 * PAGE and found["storage_pages_corrupt"] == 1 and found["storage_pages_loaded"] == 5


@pytest.mark.parametrize("offset", [8, 64], ids=["version", "tokens"])
def test_a_wrong_header_is_a_miss(published: list[Path], tmp_path: Path, offset: int) -> None:
    """Goal: the header counts (test_unit has each field). Method: flip a bit of it in the seventh page."""
    overwrite(copied(published, tmp_path)[6], offset)
    cached, found = restarted(tmp_path)
    assert cached == 6 * PAGE and found["storage_pages_corrupt"] == 1


@pytest.mark.parametrize("keep", [0, 100, 0.5, "kv"], ids=str)
def test_a_torn_page_is_a_miss(published: list[Path], tmp_path: Path, keep: Any) -> None:
    """Goal: a file cut anywhere is no page, above all one that has lost just its index-K. Method: cut the fifth."""
    path = copied(published, tmp_path)[4]
    size = path.stat().st_size
    with server(tmp_path) as engine:
        kv_end = HEADER_BYTES + engine.coordinator.storage.unit.kv_bytes
        assert kv_end < size == engine.coordinator.storage.unit.num_bytes
    length = kv_end if keep == "kv" else int(keep * size) if isinstance(keep, float) else keep
    path.write_bytes(path.read_bytes()[:length])
    cached, found = restarted(tmp_path)
    assert cached == 4 * PAGE and found["storage_pages_loaded"] == 4


def test_a_missing_page_ends_the_prefix(published: list[Path], tmp_path: Path) -> None:
    """Goal: pages behind a hole are of no use. Method: remove the sixth of eight."""
    copied(published, tmp_path)[5].unlink()
    cached, found = restarted(tmp_path)
    assert cached == 5 * PAGE and found["storage_pages_loaded"] == 5 and found["storage_pages_missed"] == 3


def test_another_pages_bytes_are_a_miss(published: list[Path], tmp_path: Path) -> None:
    """Goal: a whole, valid page under a wrong name is not used. Method: put the first page in the place of the fifth."""
    files = copied(published, tmp_path)
    shutil.copy(files[0], files[4])
    cached, found = restarted(tmp_path)
    assert cached == 4 * PAGE and found["storage_pages_corrupt"] == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"served_model_name": "another-model"},
        {"num_layers": 8},
        {"index_topk_freq": 1},
        {"weight_version": "2"},
    ],
    ids=["model", "layers", "index-layers", "weights"],
)
def test_pages_of_another_model_are_not_seen(published: list[Path], tmp_path: Path, changes: dict[str, Any]) -> None:
    """Goal: model, weights and layout are part of a page's name. Method: restart with another one over the same files."""
    copied(published, tmp_path)
    cached, found = restarted(tmp_path, **changes)
    assert cached == 0 and found["storage_pages_loaded"] == 0 and found["storage_pages_corrupt"] == 0


def test_files_of_another_model_under_our_names_are_a_miss(published: list[Path], tmp_path: Path) -> None:
    """Goal: the header is believed, not the name. Method: rename another model's page of the same tokens to ours."""
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir()
    ours.mkdir()
    with server(theirs, weight_version="2") as engine:
        serve(engine, [PROMPT], new=2)
        publish(engine)
    by_hash = {page_hash: path for path in units(theirs) for page_hash in hashes_of(PROMPT) if page_hash in path.name}
    for path, page_hash in zip(published, hashes_of(PROMPT), strict=True):
        shutil.copy(by_hash[page_hash], ours / path.name)
    cached, found = restarted(ours)
    assert cached == 0 and found["storage_pages_corrupt"] == 1 and found["storage_pages_loaded"] == 0
