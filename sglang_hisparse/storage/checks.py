"""What `storage_backend` accepts, before weights load. Called by validation; opens and writes nothing, imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_hisparse.config import ResolvedConfig
from sglang_hisparse.config_text import refuse

#: backends of SGLang 0.5.23 that keep a tensor of bytes under a key. The others want addresses in a pool of their layout.
BACKENDS = ("file", "seaweedfs", "dynamic")
_DYNAMIC_KEYS = ("backend_name", "module_path", "class_name")
# As HiCache's file backend has it.
_FOLDER_VARIABLE, _DEFAULT_FOLDER = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", "/tmp/hicache"


def check_storage(settings: ResolvedConfig, *, radix_cache: bool) -> None:
    """Raise ConfigError where `storage_backend` cannot serve; nothing is opened or written."""
    name, extra = settings.storage_backend, dict(settings.storage_extra_config or {})
    if name is None:
        return
    allowed = ", ".join(BACKENDS)
    if name not in BACKENDS:
        known = name in _registered()
        why = "does not keep bytes by key" if known else "is no storage backend of HiCache"
        refuse("storage_backend", name, why, allowed)
    if not radix_cache:
        refuse("storage_backend", name, "keeps prefixes of the radix cache, which is disabled", "null")
    if name == "file":
        _check_folder(os.environ.get(_FOLDER_VARIABLE) or extra.get("file_storage_path") or _DEFAULT_FOLDER)
    if name == "dynamic":
        _check_class(extra)


def _registered() -> list[str]:
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    return list(StorageBackendFactory._registry)


def _check_folder(name: Any) -> None:
    if not isinstance(name, str):
        refuse("storage_extra_config.file_storage_path", name, "is not a path", "a folder that can be written to")
    folder = Path(name)
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        refuse(
            "storage_extra_config.file_storage_path",
            str(folder),
            "cannot be written to",
            "a folder that can be written to",
        )


def _check_class(extra: Mapping[str, Any]) -> None:
    missing = [key for key in _DYNAMIC_KEYS if not isinstance(extra.get(key), str)]
    if missing:
        refuse("storage_extra_config", extra, f"lacks {missing[0]}", f"an object with {', '.join(_DYNAMIC_KEYS)}")
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    try:
        StorageBackendFactory._load_backend_class(extra["module_path"], extra["class_name"], extra["backend_name"])
    except (ImportError, AttributeError, TypeError) as error:
        refuse("storage_extra_config", extra, f"names no backend ({error})", "a subclass of HiCacheStorage")
