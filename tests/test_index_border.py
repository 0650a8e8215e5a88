"""Goal: the comparison of borders is right, and the probe speaks the driver's language. Method: hand arithmetic on small
shapes, the server's own plan beside the table, and on a GPU the probe itself."""

import ctypes

import border_probe
import index_border
import pytest
import torch
from index_border import CHUNK_BYTES, chunked_bytes, chunked_tokens, overlapped_tokens, plain_tokens, rows

from sglang_hisparse.layout import KVShape

ALL_LEAD = KVShape(num_layers=2, num_leaders=2, row_bytes=1000, index_row_bytes=100)
GROUPED = KVShape(num_layers=6, num_leaders=2, row_bytes=1000, index_row_bytes=100)


def test_plain_by_hand() -> None:
    """Goal: the yardstick is plain SGLang's pool. Method: bytes for exactly 10 pages and the pad page, then one less."""
    exact = 11 * 64 * 2 * 1100
    assert plain_tokens(ALL_LEAD, exact) == 640
    assert plain_tokens(ALL_LEAD, exact - 1) == 576


def test_chunks_by_hand() -> None:
    """Goal: whole chunks are counted for every buffer. Method: one token more than fills a KV chunk."""
    fits = CHUNK_BYTES // 1000 // 64 * 64 - 64  # beside the pad page
    assert chunked_bytes(ALL_LEAD, fits, fits) == (2 + 2) * CHUNK_BYTES
    assert chunked_bytes(ALL_LEAD, fits + 64, fits) == (4 + 2) * CHUNK_BYTES
    assert chunked_tokens(ALL_LEAD, 4 * CHUNK_BYTES, None) == fits
    assert chunked_tokens(ALL_LEAD, 6 * CHUNK_BYTES - 1, None) == fits
    assert chunked_tokens(ALL_LEAD, 6 * CHUNK_BYTES, 20 * fits) == fits, "index-K of so many tokens takes two chunks a layer"
    assert chunked_tokens(ALL_LEAD, 6 * CHUNK_BYTES - 1, 20 * fits) == 0


@pytest.mark.parametrize(
    ("shape", "bundle", "lost_pages"), [(ALL_LEAD, 1, 10), (GROUPED, 1, 10), (GROUPED, 3, 4), (ALL_LEAD, 2, 5)]
)
def test_overlap_by_hand(shape: KVShape, bundle: int, lost_pages: int) -> None:
    """Goal: index-K eats as many pages as its bytes cover. Method: 100 pages beyond the start, a tenth of a page each."""
    start = 1000 * 64
    assert overlapped_tokens(shape, start, start, bundle) == start
    assert overlapped_tokens(shape, start, start + 100 * 64, bundle) == start - lost_pages * 64


def test_the_table_says_what_the_study_says() -> None:
    """Goal: the conclusions follow from the figures. Method: every row of the table."""
    found = list(rows())
    assert len(found) == len(index_border.CASES) * len(index_border.RATIOS)
    for row in found:
        assert row.chunks_start > 0.98 and row.overlap_start > 0.98, "no host use: within 2 % of plain"
        assert row.fixed - 0.015 < row.chunks_full <= row.fixed + 1e-3, "all in use: chunks equal the fixed border"
        assert row.overlap_full <= row.bundle_full <= row.fixed + 1e-3
        if not row.case.startswith("GLM"):
            assert row.overlap_full == pytest.approx(row.fixed, abs=2e-3), "every layer leads: nothing is lost"
    assert index_border.table_markdown().count("\n") == len(found) + 1


def test_the_drivers_structures_have_their_sizes() -> None:
    """Goal: the driver reads what is meant. Method: sizes and offsets of cuda.h."""
    assert ctypes.sizeof(border_probe.Properties) == 32 and border_probe.Properties.location.offset == 8
    assert border_probe.Properties.metadata.offset == 16 and border_probe.Properties.flags.offset == 24
    assert ctypes.sizeof(border_probe.Access) == 12 and border_probe.Access.flags.offset == 8


@pytest.mark.gpu
def test_the_probe_on_a_gpu() -> None:
    """Goal: chunks can be moved under a running device. Method: the probe with a few chunks."""
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU")
    found = border_probe.probe(12)
    assert found["granularity_bytes"] in (CHUNK_BYTES, CHUNK_BYTES // 2, 1 << 16)
    assert found["graph_reads_new_chunk"] and found["contents_kept_while_moved"]
    assert found["read_mapped_gbps"] > 0.5 * found["read_allocated_gbps"]
