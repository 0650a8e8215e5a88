#!/usr/bin/env python3
"""Write a small DeepSeek-V3.2 checkpoint whose text depends on the KV rows that attention reads.

It owns the checkpoint folder it is given: config.json and one safetensors file a layer. Servers load the folder with
--skip-tokenizer-init; a run writes about 1.7 GB in well under a minute and needs no GPU. The weights come from
serving/retrieval_weights.py, which says how they work; equal seeds give equal bytes.
"""

import argparse
import json
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from safetensors.torch import save_file
from serving.retrieval_plan import make_plan
from serving.retrieval_weights import Named, RetrievalWeights

# DeepSeek-V3.2 with 8 dense layers, a 2,048-wide stream and a vocabulary of 2**15.
FULL_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 8,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 4096,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 512,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 8,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.44.2",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 32768,
}


def _groups(weights: RetrievalWeights) -> Iterator[tuple[str, Iterator[Named]]]:
    yield "embedding", weights.embedding()
    for layer in range(weights.plan.num_layers):
        yield f"layer-{layer:03d}", weights.layer(layer)
    yield "head", weights.head()


def write_checkpoint(out: pathlib.Path, config: dict[str, Any], seed: int) -> int:
    """Write config.json, the safetensors files and their index into `out`; return the bytes of all tensors.

    Raises ValueError when the config's shapes cannot hold the program.
    """
    weights = RetrievalWeights(make_plan(config), seed)
    out.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for label, named in _groups(weights):
        tensors = dict(named)
        file = f"model-{label}.safetensors"
        save_file(tensors, out / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (out / "config.json").write_text(json.dumps(config, indent=1))
    return total_bytes


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=pathlib.Path, help="checkpoint folder; files in it are replaced")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--layers", type=int, default=8, help="decoder layers, at least 8 for the whole vocabulary")
    args = parser.parse_args(argv)
    torch.set_grad_enabled(False)
    start = time.perf_counter()
    config = FULL_CONFIG | {"num_hidden_layers": args.layers, "first_k_dense_replace": args.layers}
    total_bytes = write_checkpoint(args.out, config, args.seed)
    print(f"{args.out}: {total_bytes / 1e9:.2f} GB in {time.perf_counter() - start:.1f} s, seed {args.seed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
