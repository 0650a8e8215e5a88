"""Goal: the launch scripts start what they say. Method: their dry runs, read by SGLang's own parser and by our rules."""

import argparse
import json
import os
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from sglang_hisparse.config import ModelFacts, parse_config
from sglang_hisparse.errors import ConfigError
from sglang_hisparse.validation import FLAG_RULES

ROOT = Path(__file__).parent.parent
GLM_5_1 = ModelFacts(index_topk=2048, num_layers=78)
# What a caller's own environment may hold; the scripts are tested without it.
VARIABLES = {
    *("MODEL_PATH", "HISPARSE_CONFIG", "IB_DEVICE", "TP_SIZE", "ATTN_DP_SIZE", "MEM_FRACTION", "MAX_RUNNING", "HOST"),
    *("PORT", "NNODES", "NODE_RANK", "DIST_INIT_ADDR", "PYTHON"),
}
# The commands that the project starts from, in today's names: --nsa-* became --dsa-*, --dp-size with
# --enable-dp-attention became --attn-dp-size, --prefill-round-robin-balance is gone, the radix cache may stay on.
SHARED = {
    "model_path": "zai-org/GLM-5.1-FP8",
    "trust_remote_code": True,
    "watchdog_timeout": 100000,
    "chunked_prefill_size": 65536,
    "max_running_requests": 480,
    "tp_size": 8,
    "attn_dp_size": 8,
    "dp_size": 1,
    "disable_radix_cache": False,
}
PAIRED = {
    "disaggregation_ib_device": "mlx5_0,mlx5_1,mlx5_2,mlx5_3",
    "dist_init_addr": "127.0.0.1:5757",
    "nnodes": 1,
    "node_rank": 0,
}
EXPECTED = {
    "colocated": SHARED | {"disaggregation_mode": "null", "mem_fraction_static": 0.85, "enable_hisparse": True},
    "pd_prefill": SHARED
    | PAIRED
    | {
        "disaggregation_mode": "prefill",
        "mem_fraction_static": 0.8,
        "schedule_conservativeness": 0.5,
        "enable_hisparse": False,
        "hisparse_config": None,
    },
    "pd_decode": SHARED
    | PAIRED
    | {
        "disaggregation_mode": "decode",
        "mem_fraction_static": 0.85,
        "load_balance_method": "round_robin",
        "kv_cache_dtype": "bfloat16",
        "dsa_decode_backend": "flashmla_sparse",
        "enable_hisparse": True,
    },
}
SETTINGS = {
    "colocated": {"top_k": 2048, "device_buffer_size": 4096, "host_to_device_ratio": 8},
    "pd_decode": {"top_k": 2048, "device_buffer_size": 6144, "host_to_device_ratio": 10},
}


def run(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The script, started from another folder and with nothing but `environment` of its variables."""
    kept = {key: value for key, value in os.environ.items() if key not in VARIABLES}
    command = ["bash", str(ROOT / "scripts" / f"launch_{name}.sh"), *arguments]
    return subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=60, cwd="/", env=kept | environment
    )


def dry_run(name: str, *arguments: str, **environment: str) -> list[str]:
    """The words of the command that the script would start."""
    result = run(name, "--dry-run", *arguments, **environment)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == 1
    return shlex.split(result.stdout)


@cache
def parser() -> argparse.ArgumentParser:
    """SGLang's own, as its launcher makes it; an unknown or malformed flag raises instead of leaving the process."""
    from sglang.srt.server_args import ServerArgs

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> None:
            raise AssertionError(message)

    made = Parser(prog="launch_server")
    ServerArgs.add_cli_args(made)
    return made


def arguments_of(words: list[str]) -> argparse.Namespace:
    """The server arguments of a command, by SGLang's parser."""
    assert words[1:3] == ["-m", "sglang.launch_server"]
    return parser().parse_args(words[3:])


@pytest.mark.parametrize("name", EXPECTED)
def test_every_flag_is_one_of_todays_and_has_the_intended_value(name: str) -> None:
    """Goal: a script works with SGLang 0.5.23. Method: its parser: full names, none deprecated, values as intended."""
    words = dry_run(name)
    arguments = vars(arguments_of(words))
    assert {key: arguments[key] for key in EXPECTED[name]} == EXPECTED[name]
    actions = {option: action for action in parser()._actions for option in action.option_strings}
    flags = [word for word in words[3:] if word.startswith("--")]
    assert [flag for flag in flags if flag not in actions] == [], "an abbreviation, which argparse would guess"
    assert [flag for flag in flags if type(actions[flag]).__name__.startswith("Deprecated")] == []


@pytest.mark.parametrize(
    "flag", ["--nsa-decode-backend", "--prefill-round-robin-balance", "--enable-dp-attention", "--dry-run"]
)
def test_old_names_would_be_noticed(flag: str) -> None:
    """Goal: the test above can fail. Method: flags of the first commands, and ours, are unknown today or deprecated."""
    action = {option: action for action in parser()._actions for option in action.option_strings}.get(flag)
    assert action is None or type(action).__name__.startswith("Deprecated")


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_accepted_for_the_model(name: str) -> None:
    """Goal: the settings are valid. Method: our parser and the facts of GLM-5.1, on the text SGLang would receive."""
    text = arguments_of(dry_run(name)).hisparse_config
    resolved = parse_config(text).resolve(GLM_5_1)
    assert json.loads(text) == SETTINGS[name]
    assert resolved.hot_pages * 64 == SETTINGS[name]["device_buffer_size"]


def refusals(name: str) -> list[str]:
    """Flags of a script's command that our rules refuse."""
    arguments = arguments_of(dry_run(name))
    refused = []
    for rule in FLAG_RULES:
        try:
            rule.check(getattr(arguments, rule.field))
        except ConfigError:
            refused.append(rule.flag)
    return refused


def test_the_colocated_command_passes_our_rules() -> None:
    """Goal: what is offered to run is not refused. Method: every flag rule on the parsed command."""
    assert refusals("colocated") == []


def test_the_decode_command_is_refused_and_the_script_says_so() -> None:
    """Goal: nobody is led to believe that P/D runs. Method: the rules, the note on stderr, the script's head."""
    assert refusals("pd_decode") == ["--disaggregation-mode"]
    result = run("pd_decode", "--dry-run")
    assert result.stderr.startswith("note: ") and "refuse to start" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    head = (ROOT / "scripts" / "launch_pd_decode.sh").read_text(encoding="utf-8").splitlines()[1]
    assert head.startswith("# NOT YET SERVED")
    assert run("colocated", "--dry-run").stderr == run("pd_prefill", "--dry-run").stderr == ""


@pytest.mark.parametrize("name", EXPECTED)
def test_the_environment_and_further_arguments_win(name: str, tmp_path: Path) -> None:
    """Goal: a script serves other models and machines. Method: set every variable, append flags; parse the result."""
    settings = tmp_path / "my settings.json"
    settings.write_text('{\n  "device_buffer_size": 8192\n}\n')
    arguments = arguments_of(
        dry_run(
            name,
            "--port",
            "31000",
            "--served-model-name",
            "a name with 'quotes'",
            MODEL_PATH="/models/V3.2 FP8",
            HISPARSE_CONFIG=str(settings),
            IB_DEVICE="mlx5_9",
            TP_SIZE="16",
            ATTN_DP_SIZE="4",
            MEM_FRACTION="0.7",
            MAX_RUNNING="64",
            HOST="0.0.0.0",
            PORT="30001",
            NNODES="2",
            NODE_RANK="1",
            DIST_INIT_ADDR="10.0.0.1:5000",
            PYTHON="/opt/python",
        )
    )
    assert (arguments.model_path, arguments.host, arguments.port) == ("/models/V3.2 FP8", "0.0.0.0", 31000)
    assert (arguments.tp_size, arguments.attn_dp_size) == (16, 4)
    assert (arguments.mem_fraction_static, arguments.max_running_requests) == (0.7, 64)
    assert (arguments.nnodes, arguments.node_rank, arguments.dist_init_addr) == (2, 1, "10.0.0.1:5000")
    assert arguments.served_model_name == "a name with 'quotes'"
    assert arguments.disaggregation_ib_device == (None if name == "colocated" else "mlx5_9")
    if name != "pd_prefill":
        assert json.loads(arguments.hisparse_config) == {"device_buffer_size": 8192}


def test_what_is_printed_is_what_is_started(tmp_path: Path) -> None:
    """Goal: a dry run can be trusted. Method: start with an interpreter that writes its arguments down; compare."""
    recorder = tmp_path / "python"
    recorder.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv))\n")
    recorder.chmod(0o755)
    for name in EXPECTED:
        started = run(name, "--log-level", "info", PYTHON=str(recorder))
        assert started.returncode == 0, started.stderr
        assert json.loads(started.stdout) == dry_run(name, "--log-level", "info", PYTHON=str(recorder))


@pytest.mark.parametrize(
    ("name", "environment", "message"),
    [
        ("colocated", {"HISPARSE_CONFIG": "/no/such.json"}, "/no/such.json"),
        ("colocated", {"NNODES": "2"}, "set DIST_INIT_ADDR"),
        ("pd_prefill", {"NNODES": "2"}, "set DIST_INIT_ADDR"),
    ],
)
def test_a_wrong_environment_ends_before_the_server(name: str, environment: dict[str, str], message: str) -> None:
    """Goal: a mistake is told at once. Method: a missing file, a second machine without an address."""
    result = run(name, "--dry-run", **environment)
    assert result.returncode != 0
    assert result.stdout == ""
    assert message in result.stderr


def test_an_empty_ib_device_leaves_the_search_to_sglang() -> None:
    """Goal: machines without these devices are served. Method: an empty variable drops the flag."""
    assert "--disaggregation-ib-device" not in dry_run("pd_prefill", IB_DEVICE="")
    assert "--disaggregation-ib-device" not in dry_run("pd_decode", IB_DEVICE="")


def test_the_smoke_preset_starts_on_one_gpu() -> None:
    """Goal: CONTRIBUTING's smoke command is right. Method: its words, parsed, and our rules' view of its settings."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (command,) = [block.replace("\\\n", " ") for block in text.split("```")[1::2] if "launch_colocated.sh" in block]
    words = shlex.split(command.removeprefix("bash\n"))
    environment = dict(word.split("=", 1) for word in words[: words.index("scripts/launch_colocated.sh")])
    environment["HISPARSE_CONFIG"] = str(ROOT / environment["HISPARSE_CONFIG"])
    arguments = arguments_of(
        dry_run("colocated", *words[words.index("scripts/launch_colocated.sh") + 1 :], **environment)
    )
    assert (arguments.tp_size, arguments.attn_dp_size) == (1, 1)
    # Without this bound the pool of a small model would fill the GPU, and eight times as much host memory.
    assert arguments.max_total_tokens == 200_000
    assert parse_config(arguments.hisparse_config).host_to_device_ratio == 8
