"""The unit of storage: one page of KV of all layers with its index-K, behind a header that says what it is.

Owns the byte layout (FORMAT.md), the keys and the checksum. Publisher and loader call it on their own threads, on buffers of
their own. It must never trust what it reads: `problem` names everything that is not exactly what was asked for.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

MAGIC = b"HISPARSE"
FORMAT_VERSION = 1
HEADER_BYTES = 256
KEY_PREFIX = "hisparse"

# magic, version, header bytes, KV bytes, index-K bytes, fingerprint, page hash; the checksum follows.
_FIELDS = struct.Struct("<8sIIQQ32s32s")
_CHECKSUM_BYTES = 16


def fingerprint_of(facts: Mapping[str, Any]) -> bytes:
    """32 bytes for everything that two servers must have in common to read each other's units; facts: plain JSON."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=32).digest()


@dataclass(frozen=True, slots=True)
class UnitFormat:
    """Layout of the units of one server. kv_bytes: one page, all layers, layer after layer; index_bytes: one page of index-K of
    all layers that own an indexer."""

    fingerprint: bytes
    kv_bytes: int
    index_bytes: int

    @property
    def num_bytes(self) -> int:
        return HEADER_BYTES + self.kv_bytes + self.index_bytes

    def key(self, page_hash: str) -> str:
        """Name of a page in the backend. page_hash: 64 hex digits, HiCache's hash of all tokens up to the page's end."""
        return f"{KEY_PREFIX}-{self.fingerprint[:8].hex()}-{page_hash}"

    def kv(self, unit: Any) -> Any:
        """The KV part of a unit (array or tensor of uint8 [num_bytes]), a view."""
        return unit[HEADER_BYTES : HEADER_BYTES + self.kv_bytes]

    def index(self, unit: Any) -> Any:
        """The index-K part, a view."""
        return unit[HEADER_BYTES + self.kv_bytes : self.num_bytes]

    def seal(self, unit: np.ndarray, page_hash: str) -> None:
        """Write the header of a unit uint8 [num_bytes] whose parts are filled in."""
        fields = self._fields(page_hash)
        unit[:HEADER_BYTES] = 0
        unit[: len(fields)] = np.frombuffer(fields, dtype=np.uint8)
        checksum = self._checksum(unit)
        unit[len(fields) : len(fields) + _CHECKSUM_BYTES] = np.frombuffer(checksum, dtype=np.uint8)

    def problem(self, unit: np.ndarray, page_hash: str) -> str | None:
        """Why `unit` uint8 [num_bytes] is not this server's page of that hash; None: it is."""
        found = unit[: _FIELDS.size].tobytes()
        if found != self._fields(page_hash):
            return self._difference(found, page_hash)
        checksum = unit[_FIELDS.size : _FIELDS.size + _CHECKSUM_BYTES].tobytes()
        return None if checksum == self._checksum(unit) else "checksum"

    def _fields(self, page_hash: str) -> bytes:
        digest = bytes.fromhex(page_hash)
        return _FIELDS.pack(
            MAGIC, FORMAT_VERSION, HEADER_BYTES, self.kv_bytes, self.index_bytes, self.fingerprint, digest
        )

    def _difference(self, found: bytes, page_hash: str) -> str:
        names = ("magic", "version", "header", "KV bytes", "index-K bytes", "fingerprint", "page hash")
        pairs = zip(names, _FIELDS.unpack(found), _FIELDS.unpack(self._fields(page_hash)), strict=True)
        return next(name for name, value, wanted in pairs if value != wanted)

    def _checksum(self, unit: np.ndarray) -> bytes:
        state = xxhash.xxh3_128()
        state.update(memoryview(unit[: _FIELDS.size]))
        state.update(memoryview(unit[HEADER_BYTES : self.num_bytes]))
        return state.digest()
