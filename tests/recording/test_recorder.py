"""Goal: the file holds what the resolver was given, whatever comes and goes. Method: the recorder alone, the runtime."""

from __future__ import annotations

import threading
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from runtime_world import PAGE, Sizes, make_world

from sglang_hisparse.errors import ConfigError
from sglang_hisparse.recording import recorder as recorder_module
from sglang_hisparse.recording.format import Header
from sglang_hisparse.recording.reader import Recording, read_recording
from sglang_hisparse.recording.recorder import MAX_REQUESTS, RING, TopKRecorder

TOP_K = 8
HEADER = Header("0.1.0", "0.5.23", "some/model", top_k=TOP_K, page_size=64, groups=(0, 3))
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Server:
    """Decode steps of requests in slots, with random selections; remembers what each set was."""

    def __init__(self, path: Path, device: str = "cpu", **options: int) -> None:
        if device == "cuda" and not torch.cuda.is_available():
            pytest.skip("no NVIDIA GPU")
        self.device, self.rng = device, np.random.default_rng(1)
        self.recorder = TopKRecorder(path, HEADER, device, **options)
        self.given: dict[tuple[int, int, int], list[int]] = {}  # (step, slot, group) -> positions
        self.steps = 0

    def selections(self, slots: list[int], seq_lens: list[int], padding: int) -> list[torch.Tensor]:
        """Per group int32 [rows + padding, top_k]."""
        chosen = []
        for group in range(len(HEADER.groups)):
            rows = np.full((len(slots) + padding, TOP_K), 7, dtype=np.int32)  # padded rows hold plausible positions
            for row, (slot, seq_len) in enumerate(zip(slots, seq_lens, strict=True)):
                positions = self.rng.permutation(seq_len)[:TOP_K]
                rows[row] = -1
                rows[row, : positions.size] = positions
                self.given[self.steps, slot, group] = sorted(positions.tolist())
            chosen.append(torch.from_numpy(rows).to(self.device))
        return chosen

    def decode(self, slots: list[int], seq_lens: list[int], padding: int = 0) -> None:
        chosen = self.selections(slots, seq_lens, padding)
        self.recorder.before_decode(slots, seq_lens)
        self.recorder.before_forward()
        for group, top_k in enumerate(chosen):
            self.recorder.note(group, top_k)
        self.steps += 1

    def close(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.recorder.close()


def settle(recorder: TopKRecorder) -> None:
    """Wait until every step on its way is written."""
    for _ in range(2000):
        if len(recorder._free) == RING:
            return
        threading.Event().wait(0.005)
    raise AssertionError("the recorder's thread does not finish")


def sets_of(recording: Recording) -> dict[tuple[int, int, int], list[int]]:
    """(step, request number, group) -> positions."""
    return {
        (step.step, number, group): recording.positions(index, group, place).tolist()
        for index, step in enumerate(recording.steps)
        for place, number in enumerate(step.requests)
        for group in range(len(recording.header.groups))
    }


@pytest.mark.parametrize("device", DEVICES)
def test_file_holds_what_the_resolver_was_given(tmp_path: Path, device: str) -> None:
    """Goal: every set, under its step, request and group. Method: batches that shrink, grow and change order; prefills between."""
    server = Server(tmp_path / "trace.topk", device)
    batches = [([3, 5], [4, 90]), ([5, 3], [91, 5]), ([5], [92]), ([2, 5, 3], [200, 93, 6]), ([2], [201])]
    for number, (slots, seq_lens) in enumerate(batches):
        server.decode(slots, seq_lens, padding=number % 3)
        settle(server.recorder)
        server.recorder.before_forward()  # a prefill: nothing is selected in it
        settle(server.recorder)
    server.close()
    recording = read_recording(tmp_path / "trace.topk")
    numbers = {3: 0, 5: 1, 2: 2}
    assert sets_of(recording) == {(s, numbers[slot], g): sets for (s, slot, g), sets in server.given.items()}
    assert [step.seq_lens for step in recording.steps] == [tuple(seq_lens) for _, seq_lens in batches]
    assert recording.header == HEADER and recording.dropped == 0


def test_a_slot_that_is_taken_again_is_another_request(tmp_path: Path) -> None:
    """Goal: two lives of a slot are not joined. Method: release between two steps of one slot."""
    server = Server(tmp_path / "trace.topk")
    server.decode([4], [50])
    server.recorder.release([4, 9])
    server.decode([4], [20])
    server.close()
    assert [(r.number, r.seq_lens) for r in read_recording(tmp_path / "trace.topk").requests()] == [
        (0, (50,)),
        (1, (20,)),
    ]


def test_a_bounded_number_of_requests_is_recorded(tmp_path: Path) -> None:
    """Goal: a large batch costs no more than a small one. Method: more requests than are sampled; one ends, one follows."""
    server, slots = Server(tmp_path / "trace.topk"), list(range(20, 20 + MAX_REQUESTS + 3))
    server.decode(slots, [100] * len(slots))
    settle(server.recorder)
    server.recorder.release([slots[0]])
    server.decode(slots[1:], [101] * (len(slots) - 1))
    server.close()
    first, second = read_recording(tmp_path / "trace.topk").steps
    assert first.requests == tuple(range(MAX_REQUESTS))
    assert second.requests == tuple(range(1, MAX_REQUESTS + 1))


def test_a_slow_file_drops_steps_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the scheduler never waits for the file. Method: hold the writing thread back, decode on; whole steps remain."""
    gate = threading.Event()
    pack = recorder_module.pack
    monkeypatch.setattr(recorder_module, "pack", lambda *arguments: gate.wait() and pack(*arguments))
    server = Server(tmp_path / "trace.topk")
    for number in range(RING + 6):
        server.decode([1], [100 + number])
    gate.set()
    settle(server.recorder)
    server.close()
    recording = read_recording(tmp_path / "trace.topk")
    assert recording.dropped == 5 and len(recording.steps) == RING + 1
    assert sets_of(recording).items() <= {(s, 0, g): sets for (s, _, g), sets in server.given.items()}.items()


def test_full_file_ends_the_recording_not_the_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Goal: a bound on the file. Method: a small one; later steps are left out, the file is whole and the log tells."""
    server = Server(tmp_path / "trace.topk", max_bytes=900)
    for number in range(20):
        server.decode([1], [100 + number])
        settle(server.recorder)
    server.close()
    assert 0 < len(read_recording(tmp_path / "trace.topk").steps) < 20
    assert "the file has reached its largest size" in caplog.text


def test_a_folder_that_goes_away_after_the_check_is_refused_too(tmp_path: Path) -> None:
    """Goal: the recorder's own error is the setting's. Method: a folder that is not there, the check left out."""
    with pytest.raises(ConfigError, match="record_file: .* cannot be written"):
        TopKRecorder(tmp_path / "nowhere" / "trace.topk", HEADER, "cpu")


def test_runtime_records_real_decode_steps(tmp_path: Path) -> None:
    """Goal: the runtime calls the recorder rightly. Method: two requests on SGLang's own classes, groups of two layers."""
    path, sizes, given = tmp_path / "trace.topk", Sizes(), []
    rng = np.random.default_rng(3)
    with make_world(sizes, record_file=str(path)) as world:
        clients = [world.start(3 * PAGE + 5), world.start(PAGE + 1, seed=1)]
        for step in range(6):
            if step == 4:
                world.finish(clients.pop(0))
            world.decode(*clients)
            settle(world.runtime.recorder)
            for layer in range(sizes.layers):
                tops = np.stack([rng.permutation(client.length)[: sizes.top_k] for client in clients])
                world.resolve(clients, torch.from_numpy(tops), layer)
                if layer % sizes.group == 0:
                    given.append([sorted(row) for row in tops.tolist()])
            lengths = [client.length for client in clients]
            assert world.runtime.recorder._launched.seq_lens == tuple(lengths)
    recording = read_recording(path)
    assert recording.header.groups == (0, 2) and recording.header.page_size == PAGE
    found = [[recording.positions(i, g, p).tolist() for p in range(len(step.requests))]
             for i, step in enumerate(recording.steps) for g in range(2)]  # fmt: skip
    assert found == given
    assert [step.requests for step in recording.steps] == [(0, 1)] * 4 + [(1,)] * 2
    assert recording.header.sglang == version("sglang") and recording.dropped == 0


@pytest.mark.gpu
def test_recording_from_a_captured_graph(tmp_path: Path) -> None:
    """Goal: a replayed graph records the step's own rows. Method: one graph of all groups, other batches at each replay."""
    server = Server(tmp_path / "trace.topk", "cuda")
    inputs = [torch.zeros((5, TOP_K), dtype=torch.int32, device="cuda") for _ in HEADER.groups]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for group, top_k in enumerate(inputs):
            server.recorder.note(group, top_k)
    for number in range(40):
        slots = server.rng.permutation([2, 3, 4])[: 1 + number % 3].tolist()
        seq_lens = [60 + number] * len(slots)
        for kept, chosen in zip(inputs, server.selections(slots, seq_lens, padding=5 - len(slots)), strict=True):
            kept.copy_(chosen)
        server.recorder.before_decode(slots, seq_lens)
        server.recorder.before_forward()
        graph.replay()
        server.steps += 1
        settle(server.recorder)
    slot_of = {number: slot for slot, number in server.recorder._sampled.items()}
    server.close()
    found = sets_of(read_recording(tmp_path / "trace.topk"))
    assert {(s, slot_of[n], g): sets for (s, n, g), sets in found.items()} == server.given
