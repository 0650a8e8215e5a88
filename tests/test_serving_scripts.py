"""Tests of the serving scripts without a GPU: a fake server speaks SGLang's HTTP, the rest is arguments and files."""

import asyncio
import json
import pathlib
import socket
import sys
import threading
from collections.abc import Iterator

import pytest

aiohttp_web = pytest.importorskip("aiohttp.web", reason="aiohttp is not installed")

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "scripts"))

import fake_sglang
import verify_server
from fake_sglang import free_port, install
from serving import client, fidelity, ranks, results, server


@pytest.fixture
def fake_paths(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> server.Paths:
    """Paths whose `site` holds a package that answers like SGLang, so that the scripts start it as a real process."""
    install(tmp_path / "site")
    monkeypatch.setattr(fidelity.time, "sleep", lambda seconds: None)
    return server.Paths(
        tmp_path / "model", tmp_path / "logs", str(tmp_path / "site"), str(tmp_path / "plugin"), str(tmp_path / "cache")
    )


@pytest.fixture
def streaming_url() -> Iterator[str]:
    """A server in this process that sends each token in its own chunk, 10 ms apart, and refuses one-token prompts."""

    async def generate(request: aiohttp_web.Request) -> aiohttp_web.StreamResponse:
        body = await request.json()
        if len(body["input_ids"]) == 1:
            return aiohttp_web.Response(status=400, text="too short")
        response = aiohttp_web.StreamResponse()
        await response.prepare(request)
        sent = []
        for token in range(body["sampling_params"]["max_new_tokens"] - (len(body["input_ids"]) == 2)):
            await asyncio.sleep(0.01)
            sent.append(token)
            await response.write(b"data: " + json.dumps({"output_ids": sent}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    ready, stop, port = threading.Event(), threading.Event(), free_port()

    async def serve() -> None:
        app = aiohttp_web.Application()
        app.router.add_post("/generate", generate)
        runner = aiohttp_web.AppRunner(app)
        await runner.setup()
        await aiohttp_web.TCPSite(runner, "127.0.0.1", port).start()
        ready.set()
        while not stop.is_set():
            await asyncio.sleep(0.01)
        await runner.cleanup()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert ready.wait(20)
    yield f"http://127.0.0.1:{port}"
    stop.set()
    thread.join()


def test_client_keeps_order_tokens_and_times(streaming_url: str) -> None:
    """Goal: replies stay in prompt order, every token timed. Method: an in-process server, three streams at once."""
    replies = client.send(streaming_url, [[5] * 3, [6] * 4, [7] * 5], 6, 3)
    assert [reply.error for reply in replies] == ["", "", ""]
    assert all(reply.tokens == list(range(6)) for reply in replies)
    assert all(reply.counts[-1] == 6 and reply.arrivals == sorted(reply.arrivals) for reply in replies)
    assert all(min(reply.ttft_s, reply.itl_s) > 0.005 for reply in replies)


def test_client_reports_refusals_and_short_answers(streaming_url: str) -> None:
    """Goal: a failed request is a failure, never a shorter text. Method: prompts that the server refuses or cuts."""
    refused, cut, good = client.send(streaming_url, [[1], [1, 2], [1, 2, 3]], 4, 1)
    assert "HTTP 400" in refused.error and "too short" in refused.error
    assert cut.error == "3 tokens instead of 4"
    assert good.error == ""
    with pytest.raises(ValueError, match="2 requests failed"):
        client.summarise([[refused, cut, good]])


def test_client_reports_a_server_that_is_gone() -> None:
    """Goal: no server is an error in the reply. Method: a port that nobody listens on."""
    (reply,) = client.send(f"http://127.0.0.1:{free_port()}", [[1, 2, 3]], 4, 1)
    assert "ClientConnector" in reply.error


def test_decode_throughput_counts_only_tokens_after_the_last_first_token() -> None:
    """Goal: prefill time stays out of decode throughput. Method: two hand-made streams that overlap by four tokens."""
    early = client.Reply(tokens=list(range(6)), start_s=0.0, arrivals=[1, 2, 3, 4, 5, 6], counts=[1, 2, 3, 4, 5, 6])
    late = client.Reply(tokens=list(range(3)), start_s=0.0, arrivals=[4, 6, 8], counts=[1, 2, 3])
    timing = client.summarise([[early, late]])
    assert timing.output_tok_s == pytest.approx(9 / 8)
    # After t = 4: two tokens of the early stream and two of the late one, until t = 8.
    assert timing.decode_tok_s == pytest.approx(4 / 4)
    assert timing.ttft_s == pytest.approx(2.5)
    assert timing.itl_ms == pytest.approx(1500)


def test_prompts_depend_on_seed_and_index_only() -> None:
    """Goal: a later call sends the same prompts. Method: the same seed with more prompts behind."""
    few, many = client.random_prompts(3, [50, 60]), client.random_prompts(3, [50, 60, 70])
    assert few == many[:2] and few != client.random_prompts(4, [50, 60])
    lengths = client.spread_lengths(32, 4096, 32256)
    assert (min(lengths), max(lengths), len(set(lengths))) == (4096, 32256, 32)
    assert lengths == client.spread_lengths(32, 4096, 32256) != sorted(lengths)


def test_server_starts_answers_flushes_and_ends(fake_paths: server.Paths) -> None:
    """Goal: one process group from start to end. Method: a fake sglang package on the server's path."""
    spec = server.ServerSpec("one", hisparse=True, plugin=True)
    with server.running(spec, fake_paths, server.Limits(), free_port(), 60) as running:
        assert running.flush()
        client.send(running.url, [[1, 2]], 3, 1)
        assert running.counters()["pages_spilled"] == 1
        process = running._process
    assert process.poll() is not None
    with pytest.raises(server.ServerError, match="server one ended"):
        running.check_alive()


def test_server_that_dies_at_start_shows_its_log(fake_paths: server.Paths) -> None:
    """Goal: the reason of a failed start is in the error. Method: a fake server that prints and exits."""
    spec = server.ServerSpec("broken", env={"FAKE_BROKEN": "broken"})
    with (
        pytest.raises(server.ServerError, match="(?s)code 7 while starting.*out of patience"),
        server.running(spec, fake_paths, server.Limits(), free_port(), 60),
    ):
        pass


def test_failures_are_found_in_a_log(fake_paths: server.Paths) -> None:
    """Goal: a traceback is told by what it ended with. Method: lines written behind those of the start."""
    with server.running(server.ServerSpec("log"), fake_paths, server.Limits(), free_port(), 60) as running:
        assert running.errors() == []
        with running.log.open("a") as log:
            log.write("ready\nTraceback (most recent call last):\n  File x\n    y()\nKeyError: 5\n[now] ERROR: no\n")
        assert running.errors() == ["Traceback (most recent call last): ... KeyError: 5", "[now] ERROR: no"]


def test_phases_of_the_comparison_set_what_they_say(tmp_path: pathlib.Path) -> None:
    """Goal: each phase tests its own setting. Method: the JSON that the server would get, per phase."""
    paths = server.Paths(tmp_path, tmp_path)
    configs = {}
    for phase, spec in verify_server.SPECS.items():
        command = server.command_line(spec, paths, server.Limits(), 1)
        configs[phase] = json.loads(command[command.index("--hisparse-config") + 1]) if spec.hisparse else None
    assert configs["plain"] is None and verify_server.PHASES.keys() == verify_server.SPECS.keys()
    assert configs["ours"] == {"top_k": 2048, "device_buffer_size": 4096, "host_to_device_ratio": 8, "elastic_border": False}
    assert configs["elastic"]["elastic_border"] is True
    assert configs["host"]["residency"] == configs["fault"]["residency"] == "always_host"
    assert configs["pressure"]["watermark_low"] > 0.1
    assert verify_server.SPECS["fault"].env == {"SGLANG_HISPARSE_FAULT": "zero_rows:0.01"}
    assert not verify_server.SPECS["noradix"].radix and verify_server.SPECS["ours"].radix


def test_config_of_every_phase_is_accepted_by_the_package() -> None:
    """Goal: no phase dies on a misspelt key. Method: the package's own parser."""
    config = pytest.importorskip("sglang_hisparse.config", reason="the package is not importable")
    for spec in verify_server.SPECS.values():
        config.parse_config(json.dumps(server.HISPARSE_CONFIG | spec.config))


@pytest.mark.parametrize(
    ("expected", "got", "place"),
    [([1, 2, 3], [1, 2, 3], None), ([1, 2, 3], [1, 9, 3], 1), ([1, 2, 3], [1, 2], 2), ([], [4], 0)],
)
def test_first_difference(expected: list[int], got: list[int], place: int | None) -> None:
    """Goal: a missing token counts as a difference. Method: equal, changed, cut and longer sequences."""
    assert fidelity.first_difference(expected, got) == place


def _verify(paths: server.Paths, out: pathlib.Path, *extra: str) -> int:
    return verify_server.main([
        str(paths.model), "--out", str(out), "--logs", str(paths.logs), "--site", paths.site, "--plugin", paths.plugin,
        "--cache", paths.cache, "--port", str(free_port()), "--prompts", "4", "--at-once", "6", "--shortest", "20",
        "--longest", "60", "--output", "80", "--commit", "abc", "--base", str(out / "none.json"), "--flush-after", "0",
        "--budget", "2000", *extra,
    ])  # fmt: skip


def test_comparison_end_to_end_on_a_fake_server(
    fake_paths: server.Paths, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: phases, reuse of plain's tokens, counters and result form. Method: a fake server that always agrees."""
    out = tmp_path / "out"
    assert _verify(fake_paths, out, "--phases", "plain,ours") == 0
    assert _verify(fake_paths, out, "--phases", "host,pressure,noradix") == 0
    document = json.loads((out / "fidelity_h200.json").read_text())
    assert next(iter(document)) == "commit" and document["commit"] == "abc" and "python" in document["versions"]
    assert document["checkpoint"] == {"prompts": 4, "texts_with_64_distinct_tokens": 4}
    rows = {row["case"]: row for row in document["rows"]}
    assert rows["hybrid, prompts of whole pages and one token, twice"]["identical"] == 2 * len(verify_server.TAILS)
    assert rows["hybrid, one at a time"]["identical"] == 4 and rows["forced spills, 6 at once"]["identical"] == 6
    assert (
        rows["always_host, one at a time"]["rows_fetched"]
        == 10 * rows["always_host, one at a time"]["pages_spilled"]
        > 0
    )
    assert all(tuple(row) == results.FIDELITY_KEYS for row in rows.values())
    # A server whose texts do not react to planted faults, or react without one, must fail the run.
    assert _verify(fake_paths, out, "--phases", "fault") == 1
    monkeypatch.setenv("FAKE_WRONG_AFTER", "33")
    assert _verify(fake_paths, out, "--phases", "fault") == 0
    assert _verify(fake_paths, out, "--phases", "noradix") == 1
    rows = {row["case"]: row for row in json.loads((out / "fidelity_h200.json").read_text())["rows"]}
    assert rows["no prefix cache, 6 at once"]["identical"] == 0


def test_comparison_without_expected_tokens_or_time(fake_paths: server.Paths, tmp_path: pathlib.Path) -> None:
    """Goal: nothing is compared with nothing; phases beyond the budget are named. Method: no plain file; 1 s."""
    assert _verify(fake_paths, tmp_path / "out", "--phases", "host") == 2
    assert _verify(fake_paths, tmp_path / "out", "--phases", "plain", "--budget", "1") == 3


def test_expected_tokens_of_other_prompts_are_refused(tmp_path: pathlib.Path) -> None:
    """Goal: results of different prompts are never mixed. Method: a file saved under another key."""
    fidelity.PlainOutputs({"seed": 1}, [[1]], [[1]]).save(tmp_path / "plain.json")
    assert fidelity.PlainOutputs.load(tmp_path / "plain.json", {"seed": 1}).single == [[1]]
    with pytest.raises(ValueError, match="was made with"):
        fidelity.PlainOutputs.load(tmp_path / "plain.json", {"seed": 2})


def test_ranks_get_no_multicast_and_a_statistics_file_each(tmp_path: pathlib.Path) -> None:
    """Goal: several ranks start as on a shared host they must. Method: command and environment at tp 1 and 2."""
    paths, spec = server.Paths(tmp_path, tmp_path), verify_server.SPECS["ours"]
    alone, two = (server.command_line(spec, paths, server.Limits(tp=tp), 1) for tp in (1, 2))
    assert two[two.index("--tp-size") + 1] == "2" and "--tp-size" not in alone
    assert set(server.TENSOR_PARALLEL_FLAGS) < set(two) and not set(server.TENSOR_PARALLEL_FLAGS) & set(alone)
    env = server.environment(spec, paths)
    assert env["NCCL_NVLS_ENABLE"] == "0"
    assert env["NVSHMEM_DISABLE_NVLS"] == env["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
    assert env["SGLANG_HISPARSE_STATS_FILE"] == str(server.stats_file(spec, paths))
    assert server.stats_file(spec, paths, 1).name == "ours.stats.rank1.json"


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({}, ["rank 1 has written no counters"]),
        ({"pages_spilled": 4}, ["pages_spilled: 3 on rank 0, 4 on rank 1"]),
        ({"pages_spilled": 3, "mismatches": 2}, ["rank 1: mismatches 2"]),
        ({"pages_spilled": 3}, []),
    ],
)
def test_what_ranks_must_share(second: dict[str, int], words: list[str]) -> None:
    """Goal: ranks that go apart are named, rank by rank. Method: hand-made counters."""
    first = {"pages_spilled": 3, "rows_fetched": 8, "audited_rows": 5}
    second = second and {"audited_rows": 6, "rows_fetched": 9} | second
    assert ranks.differences([first, second]) == words
    assert ranks.differences([first, first | {"audited_rows": 0}]) == ["rank 1 has audited no rows"]


def test_comparison_with_two_ranks(
    fake_paths: server.Paths, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: servers start together, ranks are compared, tokens of one rank are not taken. Method: a fake server, tp 2."""
    monkeypatch.setattr(ranks, "PATIENCE_S", 0.1)
    out, together = tmp_path / "out", ("--tp", "2", "--together", "--ratio", "4")
    assert _verify(fake_paths, out, "--phases", "plain") == 0
    assert _verify(fake_paths, out, *together, "--phases", "ours") == 2
    # The fake server has one rank: tokens agree, and the second rank's silence fails the run.
    assert _verify(fake_paths, out, *together, "--phases", "plain,pressure") == 1
    rows = {row["case"]: row for row in json.loads((out / "fidelity_h200.json").read_text())["rows"]}
    assert rows["tp 2: forced spills, 6 at once"]["identical"] == 6
    monkeypatch.setenv("FAKE_RANKS", "2")
    assert _verify(fake_paths, out, *together, "--phases", "ours,pressure") == 0
    assert _verify(fake_paths, out, "--tp", "2", "--phases", "pressure") == 0
    assert _verify(fake_paths, out, "--phases", "pressure") == 2
    monkeypatch.setenv("FAKE_BROKEN", "ours")
    assert _verify(fake_paths, out, *together, "--phases", "ours,pressure") == 1


def test_ratio_reaches_servers_with_a_host_tier_only(tmp_path: pathlib.Path) -> None:
    """Goal: one flag changes the host tier of all phases. Method: specs with and without it."""
    base = [str(tmp_path), "--out", str(tmp_path), "--commit", "abc"]
    args = verify_server.parse_arguments([*base, "--ratio", "3"])
    assert verify_server.spec_of("pressure", args).config["host_to_device_ratio"] == 3
    assert verify_server.spec_of("pressure", args).config["watermark_low"] > 0.1
    assert verify_server.spec_of("plain", args) == verify_server.SPECS["plain"]
    assert verify_server.spec_of("ours", verify_server.parse_arguments(base)) == verify_server.SPECS["ours"]


@pytest.mark.parametrize(
    "arguments", [["--phases", "plain,nosuch"], ["--prompts", "9", "--at-once", "8"], ["--commit", ""]]
)
def test_bad_arguments_are_refused(arguments: list[str], tmp_path: pathlib.Path) -> None:
    """Goal: a mistake costs no device time. Method: arguments that cannot work, before any server starts."""
    with pytest.raises(SystemExit):
        verify_server.parse_arguments([str(tmp_path), "--out", str(tmp_path), *arguments])


def test_result_rows_of_another_form_are_refused(tmp_path: pathlib.Path) -> None:
    """Goal: the files keep one form. Method: a row with missing keys, then rows that replace and extend a base file."""
    good = dict.fromkeys(results.FIDELITY_KEYS, 0) | {"case": "a"}
    with pytest.raises(ValueError, match="the form has"):
        results.add_rows({"rows": []}, [{"case": "a"}], results.FIDELITY_KEYS, results.FIDELITY_IDENTITY)
    base, path = tmp_path / "base.json", tmp_path / "new" / "file.json"
    results.write_json(base, {"commit": "old", "rows": [good, good | {"case": "b"}]})
    update = (results.FIDELITY_KEYS, results.FIDELITY_IDENTITY, {"commit": "new"})
    results.update(path, base, [good | {"identical": 5}], *update)
    document = json.loads(path.read_text())
    assert document["commit"] == "new"
    assert [(row["case"], row["identical"]) for row in document["rows"]] == [("b", 0), ("a", 5)]
    assert json.loads(base.read_text())["commit"] == "old"


def test_rows_of_656_bytes_run_on_the_backend_that_hisparse_takes(tmp_path: pathlib.Path) -> None:
    """Goal: --kv-dtype fp8_e4m3 starts servers that SGLang accepts. Method: both backends in the command of each dtype."""
    paths, spec = server.Paths(tmp_path, tmp_path), verify_server.SPECS["ours"]
    for kv_dtype, backend in (("bfloat16", "flashmla_sparse"), ("fp8_e4m3", "flashmla_kv")):
        command = server.command_line(spec, paths, server.Limits(kv_dtype=kv_dtype), 1)
        assert command[command.index("--kv-cache-dtype") + 1] == kv_dtype
        assert [command[command.index(f"--dsa-{phase}-backend") + 1] for phase in ("prefill", "decode")] == [backend] * 2


def test_free_ports_are_free() -> None:
    """Goal: a port given to a server, and those counted from it, are no one's, and no outgoing connection's. Method: one of
    them is held, and the block is refused; a closed connection's port is not held."""
    for _ in range(20):
        assert 10_000 <= free_port() <= 32_767 - fake_sglang.PORTS_TOGETHER
    first = free_port()
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", first + 50))
        held.listen()
        assert not fake_sglang.block_is_free(first)
        with socket.create_connection(held.getsockname()) as client:
            held.accept()[0].close()
            assert client.recv(1) == b""
    assert fake_sglang.block_is_free(first)
