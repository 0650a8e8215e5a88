"""Goal: what HiSparse cannot run with is refused before weights load. Method: SGLang's own ServerArgs and views."""

import argparse
import inspect
import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hisparse.config import GIB
from sglang_hisparse.errors import ConfigError
from sglang_hisparse.validation import (
    FLAG_RULES,
    Accepts,
    FlagRule,
    check_host_memory,
    refusals_markdown,
    resolve_settings,
    validate_server_args,
)

MODEL = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "hidden_size": 512,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
    "intermediate_size": 512,
    "kv_lora_rank": 512,
    "max_position_embeddings": 32768,
    "num_attention_heads": 8,
    "num_hidden_layers": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 256,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 1024,
    "torch_dtype": "bfloat16",
}
# A value that each kind of rule refuses, as SGLang's parser would store it.
REFUSED_VALUE = {Accepts.OFF: True, Accepts.ONE: 2, Accepts.NULL: "prefill", Accepts.NONE: "EAGLE"}
ACCEPTED_VALUES = {
    Accepts.OFF: (False, None),
    Accepts.ONE: (1, None),
    Accepts.NULL: ("null",),
    Accepts.NONE: (None, "NONE", "none"),
}


@pytest.fixture
def arguments(tmp_path: Path) -> Callable[..., Any]:
    """A function that builds SGLang's resolved view of its real ServerArgs, with fields of the caller's choice."""
    from sglang.srt.arg_groups.overrides import ResolvedView
    from sglang.srt.server_args import prepare_server_args

    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    argv = ["--model-path", str(tmp_path), "--load-format", "dummy", "--skip-tokenizer-init", "--device", "cuda"]

    def build(config: str | None = None, **fields: Any) -> ResolvedView:
        settings = ["--hisparse-config", config] if config is not None else []
        record = prepare_server_args([*argv, "--enable-hisparse", *settings])
        resolved = {
            "kv_cache_dtype": "bfloat16",
            "dsa_prefill_backend": "flashmla_sparse",
            "dsa_decode_backend": "flashmla_sparse",
            "page_size": 64,
        }
        return ResolvedView(record, overlay={**resolved, **fields})

    return build


@pytest.fixture
def on_cuda() -> Any:
    """SGLang believes that it runs on an NVIDIA GPU."""
    from sglang.srt.runtime_context import override_platform

    with override_platform(is_cuda=True, is_hip=False):
        yield


@pytest.fixture
def original() -> Callable[[Any], None]:
    """SGLang's own check, unhooked also where other tests of this process have applied the hooks."""
    from sglang.srt.arg_groups import hisparse_hook

    return inspect.unwrap(hisparse_hook.validate_hisparse)


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("radix_disabled", [False, True])
def test_the_radix_cache_may_be_on_or_off(arguments, original, radix_disabled: bool, caplog) -> None:
    """Goal: SGLang's check runs without its demand for no radix cache. Method: both settings with the real check."""
    view = arguments('{"host_to_device_ratio": 2.5, "swap_in_block_size": 960}', disable_radix_cache=radix_disabled)
    # Building ServerArgs sets up logging anew, so the handler is put on the logger itself.
    logger = logging.getLogger("sglang_hisparse.validation")
    logger.addHandler(caplog.handler)
    try:
        resolved = validate_server_args(view, original)
    finally:
        logger.removeHandler(caplog.handler)
    assert (resolved.top_k, resolved.device_buffer_size, resolved.host_to_device_ratio) == (2048, 4096, 2.5)
    assert resolved.summary() in caplog.text
    assert "swap_in_block_size: 960 is ignored" in caplog.text
    assert view.disable_radix_cache is radix_disabled


@pytest.mark.usefixtures("on_cuda")
def test_a_recording_that_cannot_be_written_is_refused(arguments, original, tmp_path: Path) -> None:
    """Goal: the line comes before weights load, not after. Method: a good file, then a folder in its place."""
    good = tmp_path / "selections.topk"
    resolved = validate_server_args(arguments(json.dumps({"record_file": str(good)})), original)
    assert resolved is not None and resolved.record_file == str(good) and not good.exists()
    with pytest.raises(ConfigError, match='^record_file: ".*" is a folder; allowed: a file'):
        validate_server_args(arguments(json.dumps({"record_file": str(tmp_path)})), original)


@pytest.mark.usefixtures("on_cuda")
def test_a_declared_radix_setting_is_lifted_as_well(arguments, original) -> None:
    """Goal: SGLang's declarations do not bring the demand back. Method: declare the radix cache on, then validate."""
    from sglang.srt.arg_groups.model_override_base import record_of
    from sglang.srt.arg_groups.overrides import declare_resolution

    view = arguments()
    declare_resolution(record_of(view), "test", disable_radix_cache=False)
    with pytest.raises(AssertionError, match="disable-radix-cache"):
        original(view)
    assert validate_server_args(view, original) is not None


@pytest.mark.usefixtures("on_cuda")
def test_prefill_backends_that_read_rows_nobody_selected_are_refused(arguments, original) -> None:
    """Goal: only backends that gather the selected rows (a union's scratch has stale ones). Method: SGLang's whole list."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    (flag,) = (action for action in parser._actions if action.dest == "dsa_prefill_backend")
    accepted = set()
    for dtype, decode in (("bfloat16", "flashmla_sparse"), ("fp8_e4m3", "flashmla_kv")):
        for choice in flag.choices:
            fields = {"kv_cache_dtype": dtype, "dsa_prefill_backend": choice, "dsa_decode_backend": decode}
            try:
                validate_server_args(arguments(**fields), original)
            except ValueError as error:
                assert f"--dsa-prefill-backend={choice}" in str(error)
            else:
                accepted.add((dtype, choice))
    fp8 = {("fp8_e4m3", "flashmla_kv"), ("fp8_e4m3", "flashinfer_sparse_mla")}
    assert accepted == fp8 | {("bfloat16", "flashmla_sparse")} and len(flag.choices) > 8


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dsa_prefill_backend": "flashmla_kv"}, "dsa-prefill-backend=flashmla_kv"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "flashmla_sparse"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "fp8_e5m2"),
    ],
)
def test_sglangs_own_checks_still_run(arguments, original, fields: dict, message: str) -> None:
    """Goal: backends that read raw rows stay refused. Method: backends and dtypes outside SGLang's own allow-list."""
    with pytest.raises(ValueError, match=message):
        validate_server_args(arguments(**fields), original)


def test_nothing_is_checked_while_hisparse_is_off() -> None:
    """Goal: the plugin changes no server without the flag. Method: a view that has no other field."""
    view = SimpleNamespace(enable_hisparse=False)
    assert validate_server_args(view, lambda _: pytest.fail("called")) is None


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("rule", FLAG_RULES, ids=lambda rule: rule.field)
def test_each_flag_rule_refuses_and_accepts(arguments, original, rule: FlagRule) -> None:
    """Goal: every rule acts, alone. Method: its field with a refused value, then with each accepted one."""
    value = REFUSED_VALUE[rule.accepts]
    with pytest.raises(ConfigError) as caught:
        validate_server_args(arguments(**{rule.field: value}), original)
    message = str(caught.value)
    assert message.startswith(f"{rule.flag}: {json.dumps(value)} cannot be combined with --enable-hisparse (")
    assert message.endswith(f"allowed: {rule.accepts.value}")
    assert "\n" not in message
    for accepted in ACCEPTED_VALUES[rule.accepts]:
        rule.check(accepted)


def test_every_flag_of_the_table_is_a_server_argument_whose_default_is_accepted() -> None:
    """Goal: no rule reads a name that SGLang does not have. Method: field names and defaults of the real ServerArgs."""
    from sglang.srt.arg_groups.arg_utils import field_names
    from sglang.srt.server_args import ServerArgs

    names = [rule.field for rule in FLAG_RULES]
    assert len(set(names)) == len(names)
    assert set(names) <= field_names(ServerArgs)
    for rule in FLAG_RULES:
        rule.check(getattr(ServerArgs(model_path="dummy"), rule.field))


def test_every_flag_of_the_table_can_be_written_on_the_command_line() -> None:
    """Goal: refusals name flags that exist. Method: SGLang's own parser knows each one."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    assert {rule.flag for rule in FLAG_RULES} <= known


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_machine_without_an_nvidia_gpu_is_refused(arguments, original, device: str) -> None:
    """Goal: ROCm (whose device is "cuda" too) and CPU end at once. Method: platform facts that say there is no CUDA."""
    from sglang.srt.runtime_context import override_platform

    with override_platform(is_cuda=False, is_hip=device == "cuda"), pytest.raises(ConfigError, match="^--device: "):
        validate_server_args(arguments(device=device), original)


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, '--model-path: "LlamaForCausalLM" has no DSA indexer'),
        ({"index_topk": None}, '--model-path: "DeepseekV32ForCausalLM" has no DSA indexer'),
        ({"architectures": ["DeepseekV4ForCausalLM"]}, "sparse cache of another layout"),
        ({"architectures": ["MiniMaxM3SparseForCausalLM"]}, "sparse cache of another layout"),
        ({"index_kpool": 4}, "index_kpool: 4 of DeepseekV32ForCausalLM"),
        ({"index_topk_pattern": "SFFFFFFF"}, "layer 0: reuses the top-k"),
        ({"index_topk": 1024}, "top_k: 2048 differs from the model's index_topk; allowed: 1024"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused(arguments, original, keys: dict, message: str) -> None:
    """Goal: only models with our cache layout start. Method: the model's config with one key changed."""
    from sglang.srt.arg_groups.overrides import model_config_of

    view = arguments('{"top_k": 2048}')
    for key, value in keys.items():
        setattr(model_config_of(view).hf_config, key, value)
        setattr(model_config_of(view).hf_text_config, key, value)
    with pytest.raises(ConfigError) as caught:
        validate_server_args(view, original)
    assert message in str(caught.value)


@pytest.mark.usefixtures("on_cuda")
def test_a_model_that_mixes_in_linear_attention_is_refused(arguments, original, monkeypatch) -> None:
    """Goal: layers without a DSA cache are not paged as if they had one. Method: SGLang reports a hybrid model."""
    from sglang.srt.configs import hybrid_arch

    monkeypatch.setattr(hybrid_arch, "mambaish_config", lambda model_config: model_config)
    with pytest.raises(ConfigError, match="mixes DSA with layers"):
        validate_server_args(arguments(), original)


@pytest.mark.usefixtures("on_cuda")
def test_a_pool_that_would_be_resized_is_refused(arguments, original, monkeypatch) -> None:
    """Goal: the page table's length is final. Method: SGLang's own predicate says that the pool will be resized."""
    from sglang.srt.arg_groups import overrides

    monkeypatch.setattr(overrides, "post_capture_kv_sizing_planned", lambda view: True)
    with pytest.raises(ConfigError, match="^SGLANG_ENABLE_POST_CAPTURE_KV_SIZING: 1 resizes"):
        validate_server_args(arguments(), original)


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize(
    ("backend", "forced", "ranks", "refused"),
    [("pplx", False, 2, True), ("deepep_v2", True, 2, True), ("deepep_v2", False, 2, False), ("pplx", False, 1, False), ("none", True, 2, False)],
)
def test_padding_that_makes_extends_of_decode_steps_is_refused(
    arguments, original, backend: str, forced: bool, ranks: int, refused: bool
) -> None:
    """Goal: no decode step goes without the resolver. Method: the backends for which SGLang pads all ranks alike, with and without DP
    attention, and SGLang's own choice of the padding beside an extend."""
    from sglang.srt.environ import envs
    from sglang.srt.layers import dp_attention
    from sglang.srt.layers.moe import utils

    with envs.SGLANG_DEEPEP_V2_FORCE_MAX_LEN.override(forced), pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "get_moe_a2a_backend", lambda: utils.MoeA2ABackend(backend))
        patch.setattr(dp_attention, "dp_gather_width", lambda: 2)
        assert dp_attention.DpPaddingMode.get_dp_padding_mode(True, [3, 5]).is_max_len() is (refused or ranks == 1)
        view = arguments(moe_a2a_backend=backend, attn_dp_size=ranks)
        if not refused:
            assert validate_server_args(view, original) is not None
            return
        with pytest.raises(ConfigError, match=f"^--moe-a2a-backend: .*{backend}.* DP attention"):
            validate_server_args(view, original)


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("how", ["saver", "pool"])
def test_a_border_that_flags_forbid_ends_the_start_only_where_it_was_asked_for(arguments, original, how: str) -> None:
    """Goal: the refusal comes before weights, and the default never refuses. Method: the memory saver and a custom pool; three settings."""
    from sglang.srt.environ import envs

    fields = {"enable_memory_saver": True} if how == "saver" else {}
    with envs.SGLANG_MOONCAKE_CUSTOM_MEM_POOL.override("NVLINK" if how == "pool" else None):
        with pytest.raises(ConfigError, match="^elastic_border: true cannot be combined with --enable-memory-saver or a custom"):
            validate_server_args(arguments('{"elastic_border": true}', **fields), original)
        for text, kept in (("{}", None), ('{"elastic_border": null}', None), ('{"elastic_border": false}', False)):
            assert validate_server_args(arguments(text, **fields), original).elastic_border is kept
    assert validate_server_args(arguments('{"elastic_border": true}'), original).elastic_border is True


@pytest.mark.usefixtures("on_cuda")
def test_settings_are_refused_before_the_model_is_looked_at(original) -> None:
    """Goal: a typo costs no model download. Method: a view without any field beyond the two."""
    view = SimpleNamespace(enable_hisparse=True, hisparse_config='{"topk": 2048}')
    with pytest.raises(ConfigError, match="^topk: unknown key; did you mean top_k"):
        validate_server_args(view, original)


def test_settings_resolve_alike_from_a_model_config() -> None:
    """Goal: workers get what validation returned. Method: a bare model config, page given and left out."""
    model_config = SimpleNamespace(hf_text_config={"index_topk": 512, "num_hidden_layers": 4})
    assert resolve_settings(None, model_config) == resolve_settings("{}", model_config, page_size=64)
    assert resolve_settings(None, model_config, page_size=256).hot_pages == 4


def test_host_memory_that_fits_passes() -> None:
    """Goal: the check is exact at its edge. Method: a pool of exactly the share, and one byte more."""
    check_host_memory(100 * GIB, 800 * GIB, 8)
    with pytest.raises(ConfigError):
        check_host_memory(100 * GIB + 1, 800 * GIB, 8)


def test_host_memory_names_figures_that_fit() -> None:
    """Goal: the remedy works. Method: the named ratio fits in the same arithmetic, and one step more does not."""

    def bytes_at(ratio: float) -> int:
        return int(400 * GIB * ratio / (4 + ratio))

    share = bytes_at(5.0)
    with pytest.raises(ConfigError) as caught:
        check_host_memory(bytes_at(10.0), share * 8, 8, ratio=10.0, bytes_at_ratio=bytes_at)
    message = str(caught.value)
    assert message.startswith("host_to_device_ratio: 10.0 needs 285.8 GiB of host memory per rank, and 222.2 GiB are ")
    named = float(message.rsplit(" ", 1)[1])
    assert named == 5.0
    assert bytes_at(named) <= share < bytes_at(named + 0.01)
    assert "allowed: host_pool_gib 222.2, or" in message


def test_host_memory_too_small_for_any_ratio() -> None:
    """Goal: no remedy is named that does not work. Method: a machine that cannot hold ratio 1."""
    with pytest.raises(ConfigError, match="allowed: a machine with 80.0 GiB free, for ratio 1"):
        check_host_memory(20 * GIB, 10 * GIB, 4, ratio=2.0, bytes_at_ratio=lambda ratio: int(20 * GIB * ratio))


def test_the_table_for_the_readme_has_one_row_for_each_rule() -> None:
    """Goal: README cannot leave a rule out. Method: rows of the generated table against the rules."""
    rows = refusals_markdown().splitlines()[2:]
    assert len(rows) == len(FLAG_RULES)
    assert all(f"`{rule.flag}`" in row for rule, row in zip(FLAG_RULES, rows, strict=True))
