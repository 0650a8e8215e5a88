"""From a few numbers to a real, published ServerArgs and a real Scheduler on the CPU.

Owns the fake checkpoint folder and every replacement that the harness makes inside SGLang 0.5.23. Called by `engine`
alone. What is bypassed, and nothing else:

1. `torch.cuda.get_device_capability` answers 9.0 while arguments are resolved (SGLang asks it for every DSA model).
2. `load_model_with_memory_saver` returns the fake model: no weights, no layers.
3. `build_attention_backends` returns the fake backend: no attention kernels.
4. The scheduler's zmq channels are lists; requests enter where `recv_requests` would return them.
5. No watchdog threads and no load snapshots in shared memory (a stopped test is not a hung server).
6. With HiSparse: this package does not demand an NVIDIA GPU, and forgets its settings between engines.

Scheduler, TpModelWorker, ModelRunner (its `_forward_raw` and eager runner too), KVCacheConfigurator, pools, allocator,
radix tree, sampler, result processing and the invariant checks are SGLang's own.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from .fake_model import FakeAttentionBackend, FakeDsaModel


@dataclass(slots=True, frozen=True)
class HarnessConfig:
    """The numbers of one engine. Tokens count logical tokens for plain SGLang, device tokens with HiSparse.

    index_topk_freq: layers per index group (1: every layer owns an indexer). server_args: anything else for ServerArgs.
    """

    device_tokens: int
    max_running_requests: int
    chunked_prefill_size: int
    page_size: int
    radix: bool
    overlap: bool
    hisparse_config: dict[str, Any] | None
    num_layers: int
    top_k: int
    index_topk_freq: int
    vocab_size: int
    context_length: int
    server_args: dict[str, Any]


class CapturingSender:
    """Takes the place of a zmq sender: keeps what the scheduler sends."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send_output(self, output: Any, recv_obj: Any = None) -> None:
        self.sent.append(output)


class NoWatchdog:
    """A watchdog that never barks."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: contextlib.nullcontext()


def write_checkpoint(folder: Path, config: HarnessConfig) -> None:
    """A DSA config.json without weights: DeepSeek-V3.2's architecture, with rows of 128 bytes instead of 1,152."""
    values = {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "first_k_dense_replace": config.num_layers,
        "hidden_act": "silu",
        "hidden_size": 64,
        "index_head_dim": 128,
        "index_n_heads": 4,
        "index_topk": config.top_k,
        "index_topk_freq": config.index_topk_freq,
        "index_skip_topk_offset": 1,
        "intermediate_size": 64,
        "kv_lora_rank": 48,
        "max_position_embeddings": config.context_length,
        "moe_intermediate_size": 64,
        "n_group": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": 4,
        "q_lora_rank": 64,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "rope_theta": 10000,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "v_head_dim": 16,
        "vocab_size": config.vocab_size,
    }
    (folder / "config.json").write_text(json.dumps(values))


def build_server_args(folder: Path, config: HarnessConfig) -> Any:
    """Real ServerArgs, resolved and validated by SGLang (its hisparse validation included)."""
    from sglang.srt.server_args import ServerArgs

    values: dict[str, Any] = {
        "model_path": str(folder),
        "device": "cpu",
        "dtype": "bfloat16",
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_total_tokens": config.device_tokens,
        "max_running_requests": config.max_running_requests,
        "chunked_prefill_size": config.chunked_prefill_size,
        "page_size": config.page_size,
        "context_length": config.context_length,
        "disable_radix_cache": not config.radix,
        "disable_overlap_schedule": not config.overlap,
        "disable_cuda_graph": True,
        "log_level": "warning",
    }
    if config.hisparse_config is not None:
        values.update(
            enable_hisparse=True,
            hisparse_config=json.dumps(config.hisparse_config),
            dsa_prefill_backend="flashmla_sparse",
            dsa_decode_backend="flashmla_sparse",
        )
    values.update(config.server_args)
    server_args = ServerArgs(**values)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("torch.cuda.get_device_capability", lambda *args, **kwargs: (9, 0)))
        if config.hisparse_config is not None:
            stack.enter_context(mock.patch("sglang_hisparse.validation._check_platform", lambda view: None))
        server_args.resolve_once()
        server_args.check_server_args()
    return server_args


@contextlib.contextmanager
def replaced_parts(model: FakeDsaModel, sender: CapturingSender) -> Iterator[None]:
    """The replacements 2 to 5 of the module docstring, in force while the Scheduler is constructed."""
    from sglang.srt.managers import scheduler as scheduler_module
    from sglang.srt.model_executor import model_runner as runner_module
    from sglang.srt.model_executor.model_runner_components.attention_backend_setup import AttentionBackends
    from sglang.srt.model_executor.model_runner_components.load_model_utils import LoadedModel

    def load_model(**kwargs: Any) -> Any:
        loader = SimpleNamespace(preloaded_weights_bytes=0)
        return LoadedModel(loader=loader, model=model, remote_instance_weight_info=None)

    def build_backends(*, model_runner: Any) -> Any:
        model.runner = model_runner
        return AttentionBackends(
            attn_backend=FakeAttentionBackend(model_runner),
            decode_attn_backend=None,
            decode_attn_backend_group=[],
            prefill_attention_backend_str="fake",
            decode_attention_backend_str="fake",
        )

    channels = SimpleNamespace(
        recv_from_tokenizer=None,
        recv_from_rpc=None,
        send_to_tokenizer=sender,
        send_to_detokenizer=sender,
        send_metrics_from_scheduler=None,
    )
    with (
        mock.patch.object(runner_module, "load_model_with_memory_saver", load_model),
        mock.patch.object(runner_module, "build_attention_backends", build_backends),
        mock.patch.object(
            scheduler_module, "SchedulerIpcChannels", SimpleNamespace(create=lambda **kwargs: channels)
        ),
        mock.patch.object(scheduler_module, "create_scheduler_watchdog", lambda *args, **kwargs: NoWatchdog()),
        mock.patch.object(scheduler_module, "create_load_snapshot_writer", lambda *args, **kwargs: None),
    ):
        yield


def build_scheduler(
    config: HarnessConfig, stack: contextlib.ExitStack
) -> tuple[Any, FakeDsaModel, CapturingSender]:
    """Do what SGLang's scheduler process does: load plugins, publish the arguments, construct the Scheduler.

    Each engine gets a runtime context of its own (SGLang's process-wide one cannot hold two engines in turn); `stack`
    keeps it active and, when closed, restores the former one.
    """
    if config.hisparse_config is not None:
        from sglang.srt.plugins import load_plugins

        from sglang_hisparse import settings

        load_plugins()
        settings.reset()
    from sglang.srt.configs.model_config import dsa_layer_skips_topk
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.runtime_context import SpawnRanks, create_context, use_context
    from sglang.srt.server_args import PortArgs

    with tempfile.TemporaryDirectory(prefix="fake-dsa-") as name:
        write_checkpoint(Path(name), config)
        server_args = build_server_args(Path(name), config)
        ranks = SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0)
        stack.enter_context(use_context(create_context(server_args, role="scheduler", ranks=ranks)))
        stack.callback(destroy_parallel_groups)
        from sglang.srt.configs.model_config import ModelConfig

        hf_config = ModelConfig.from_server_args(server_args).hf_text_config
        model = FakeDsaModel(
            num_layers=config.num_layers,
            leader_layers=[not dsa_layer_skips_topk(hf_config, i) for i in range(config.num_layers)],
            top_k=config.top_k,
            vocab_size=config.vocab_size,
        )
        sender = CapturingSender()
        with replaced_parts(model, sender):
            scheduler = Scheduler(server_args, PortArgs.init_new(server_args))
    return scheduler, model, sender


def destroy_parallel_groups() -> None:
    """Drop the single-rank process groups of a Scheduler, so that the next one can build its own."""
    from sglang.srt.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    destroy_model_parallel()
    destroy_distributed_environment()
