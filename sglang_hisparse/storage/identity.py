"""What two servers must have in common to read each other's pages, gathered from SGLang's own arguments.

Called once, when the scheduler is built. It reads a few kilobytes of each weight file, so that two models of one shape and one
served name are told apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_hisparse.storage.unit import FORMAT_VERSION

_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".gguf"}
_SAMPLE_BYTES, _SAMPLES = 4096, 3


def weights_digest(folder: str) -> str:
    """Digest of name, size and three samples of every weight file in `folder`; "" where it is no local folder."""
    root = Path(folder)
    if not root.is_dir():
        return ""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(path for path in root.iterdir() if path.suffix in _WEIGHT_SUFFIXES and path.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size};".encode())
        with path.open("rb") as file:
            for sample in range(1, _SAMPLES + 1):
                file.seek(size * sample // (_SAMPLES + 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def page_facts(server_args: Any, hf_config: Any, pool: Any, leaders: Sequence[int], page_size: int) -> dict[str, Any]:
    """Plain JSON of model, weights and layout. server_args: SGLang's, resolved; hf_config: the model's configuration."""
    config = {
        key: value for key, value in hf_config.to_dict().items() if key not in ("_name_or_path", "transformers_version")
    }
    return {
        "format": FORMAT_VERSION,
        "model": server_args.served_model_name or server_args.model_path,
        "revision": server_args.revision,
        "config": hashlib.blake2b(repr(sorted(config.items())).encode(), digest_size=16).hexdigest(),
        "weights": weights_digest(server_args.model_path),
        "weight_version": server_args.weight_version,
        "quantization": server_args.quantization,
        "kv_dtype": str(pool.dtype),
        "store_dtype": str(pool.store_dtype),
        "row_bytes": pool.row_bytes,
        "layers": [pool.start_layer, pool.layer_num],
        "index_layers": list(leaders),
        "page_size": page_size,
    }
