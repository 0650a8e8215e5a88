"""Goal: a storage backend that cannot serve is refused before weights load, in one line. Method: a table of settings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang_hisparse.config import ModelFacts, ResolvedConfig, parse_config
from sglang_hisparse.errors import ConfigError
from sglang_hisparse.storage.backend import Store
from sglang_hisparse.storage.checks import BACKENDS, check_storage
from sglang_hisparse.storage.counters import StorageCounters
from sglang_hisparse.storage.identity import weights_digest

OWN = {"backend_name": "own", "module_path": "storage.backends", "class_name": "OwnBackend"}


def settings(backend: str | None, extra: dict[str, Any] | None = None) -> ResolvedConfig:
    import json

    keys = {"storage_backend": backend, "storage_extra_config": extra}
    return parse_config(json.dumps(keys)).resolve(ModelFacts(index_topk=2048, num_layers=4))


@pytest.mark.parametrize(
    ("backend", "extra", "message"),
    [
        ("files", None, 'storage_backend: "files" is no storage backend of HiCache; allowed: file, seaweedfs, dynamic'),
        ("mooncake", None, 'storage_backend: "mooncake" does not keep bytes by key; allowed: file, seaweedfs, dynamic'),
        ("sim", None, 'storage_backend: "sim" does not keep bytes by key; allowed: file, seaweedfs, dynamic'),
        ("dynamic", {"module_path": "a"}, "lacks backend_name"),
        ("dynamic", OWN | {"class_name": "Nothing"}, "names no backend"),
        ("dynamic", OWN | {"class_name": "Gate"}, "names no backend"),
        ("dynamic", OWN | {"module_path": "no.such.module"}, "names no backend"),
        ("file", {"file_storage_path": 3}, "storage_extra_config.file_storage_path: 3 is not a path"),
        ("file", {"file_storage_path": __file__ + "/x"}, "cannot be written to"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_refusals(backend: str, extra: dict[str, Any] | None, message: str) -> None:
    """Goal: key, value and remedy. Method: names, classes and folders that cannot serve."""
    with pytest.raises(ConfigError) as caught:
        check_storage(settings(backend, extra), radix_cache=True)
    assert message in str(caught.value) and len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("backend", "extra"), [(None, None), ("file", {"file_storage_path": "/tmp/not-there-yet/pages"}), ("dynamic", OWN)]
)
def test_what_can_serve_is_accepted(backend: str | None, extra: dict[str, Any] | None) -> None:
    """Goal: nothing is refused that works, and nothing is created. Method: no storage, a folder to be made, a class of one's own."""
    check_storage(settings(backend, extra), radix_cache=True)
    assert not os.path.exists("/tmp/not-there-yet")


def test_storage_needs_the_radix_cache() -> None:
    """Goal: a setting without effect is refused. Method: storage without a radix cache."""
    with pytest.raises(ConfigError, match="keeps prefixes of the radix cache"):
        check_storage(settings("file"), radix_cache=False)


def test_the_allowed_backends_are_sglangs() -> None:
    """Goal: no name is offered that SGLang has dropped. Method: its factory's register."""
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    assert set(BACKENDS) - {"dynamic"} <= set(StorageBackendFactory._registry)


def test_a_store_never_raises() -> None:
    """Goal: whatever a backend does is a miss. Method: a backend that has no method at all."""
    counters = StorageCounters()
    store = Store(object(), counters)
    assert store.count_leading(["a"]) == 0 and not store.put("a", None) and not store.get("a", None)
    store.clear()
    store.close()
    assert counters.read()["storage_errors"] == 4


def test_weights_are_told_apart(tmp_path: Path) -> None:
    """Goal: two models of one shape and name have different pages. Method: folders with equal, changed and renamed weight files."""

    def folder(name: str, content: bytes, file: str = "model-1.safetensors") -> str:
        path = tmp_path / name
        path.mkdir()
        (path / file).write_bytes(content)
        (path / "config.json").write_text(name)
        return str(path)

    weights = bytes(range(256)) * 400
    changed = bytearray(weights)
    changed[len(weights) // 2 + 5] ^= 1
    digests = [
        weights_digest(folder("a", weights)),
        weights_digest(folder("b", bytes(changed))),
        weights_digest(folder("c", weights + b"x")),
        weights_digest(folder("d", weights, "model-2.safetensors")),
        weights_digest("an/id-on-a-hub"),
    ]
    assert len(set(digests)) == len(digests)
    assert weights_digest(folder("e", weights)) == digests[0]


def test_a_machine_that_cannot_hash_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a missing compiler is a line at start, not a failure later. Method: SGLang's function fails as it does then."""
    from sglang_hisparse.storage import tier

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("Failed to load HiCache native hash extension") from OSError("no compiler")

    monkeypatch.setattr(tier, "get_storage_hash_str", fail)
    with pytest.raises(ConfigError, match="page hash cannot be compiled here .no compiler.; allowed: null, or a C"):
        tier._prepare_hashing()
