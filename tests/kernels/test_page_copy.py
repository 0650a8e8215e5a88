"""Goal: page copies, gathers, translations and the audit do what they say. Method: shared checks on the CPU and the GPU."""

from __future__ import annotations

import kernel_checks
import pytest
import torch

from sglang_hisparse.kernels.page_copy import Direction, copy_pages, fetch_union

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "check",
    [kernel_checks.page_copies, kernel_checks.gathers, kernel_checks.unions],
    ids=lambda check: check.__name__,
)
def test_copies(device: str, check) -> None:
    """Goal: bytes arrive where they belong and nowhere else. Method: against torch indexing."""
    assert check(device)


@pytest.mark.parametrize("device", DEVICES)
def test_translations(device: str) -> None:
    """Goal: readers never see a row that is not there. Method: known tables, both index types."""
    assert kernel_checks.translations(device)


@pytest.mark.parametrize("device", DEVICES)
def test_audit_finds_what_was_spoilt(device: str) -> None:
    """Goal: the audit of a server means something. Method: flip one byte and one answer, count two."""
    assert kernel_checks.audits(device)


def test_wrong_arguments_are_named() -> None:
    """Goal: a mistake is told by argument. Method: one wrong argument at a time."""
    bases, pages = torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    good = {
        "direction": Direction.TO_HOST,
        "host_bases": bases,
        "device_bases": bases,
        "host_pages": pages,
        "device_pages": pages,
        "page_bytes": 16,
    }
    for change, error, message in (
        ({"page_bytes": 24}, ValueError, "page_bytes must be a multiple of 16, not 24"),
        ({"device_pages": pages[:1]}, ValueError, "device_pages has size 1, expected 2"),
        ({"host_bases": bases.int()}, TypeError, "host_bases must be int64"),
        ({"max_blocks": 0}, ValueError, "max_blocks must be 1 to 1024, not 0"),
    ):
        with pytest.raises(error, match=message):
            copy_pages(**{**good, **change})


def test_wrong_arguments_of_a_union_are_named() -> None:
    """Goal: a mistake is told by argument. Method: one wrong argument at a time."""
    base, words = torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    good = {"ids": words, "table": words, "host_base": base, "scratch_base": base, "marks": words, "fetched": base}
    sizes = {"host_places": 0, "row_bytes": 16, "page_size": 16}
    for change, error, message in (
        ({"row_bytes": 24}, ValueError, "row_bytes must be a multiple of 16 up to 65536, not 24"),
        ({"host_places": 4}, ValueError, "marks has bits for 64 rows, 4 host-only pages need more"),
        ({"ids": base}, TypeError, "ids must be int32"),
        ({"host_base": words}, TypeError, "host_base must be int64"),
    ):
        with pytest.raises(error, match=message):
            fetch_union(**{**good, **sizes, **change})
