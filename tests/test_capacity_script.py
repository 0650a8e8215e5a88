"""What scripts/verify_capacity.py makes of the servers' answers; real servers run on a GPU."""

import json
import pathlib
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import verify_capacity
from serving import server


class Answers:
    """A server as far as the script asks one."""

    def __init__(self, spec: server.ServerSpec, tokens: int | None, device_pages: int) -> None:
        self.spec, self._tokens, self._pages = spec, tokens, device_pages

    def get(self, path: str, timeout_s: float = 5.0) -> str | None:
        assert path == "/server_info"
        return None if self._tokens is None else json.dumps({"max_total_num_tokens": self._tokens})


def _run(
    monkeypatch: pytest.MonkeyPatch, out: pathlib.Path, elastic_pages: int, plain: int | None = 64_000, open_pages: int = 981
) -> int:
    pools = {"plain": (plain, 0), "ours_elastic": (128_000, elastic_pages), "ours_open": (128_000, open_pages), "ours": (128_000, 900)}

    @contextmanager
    def running(spec: server.ServerSpec, paths: server.Paths, limits: server.Limits, *rest: float) -> Iterator[Answers]:
        assert limits.pool_tokens == verify_capacity.NO_LIMIT and limits.mem_fraction == 0.3
        yield Answers(spec, *pools[spec.name.removeprefix("capacity-")])

    def counters(asked: Answers) -> dict[str, int]:
        return {"device_pages_free": asked._pages - 2, "device_pages_resident": 2, "device_pages_hot": 0}

    monkeypatch.setattr(verify_capacity, "running", running)
    monkeypatch.setattr(verify_capacity, "settled_counters", counters)
    return verify_capacity.main(["model", "--out", str(out), "--commit", "abc", "--mem-fraction", "0.3"])


def test_two_per_cent_are_the_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Goal: 980 of 1,000 pages hold, 979 do not. Method: both; the file has what was found."""
    assert _run(monkeypatch, tmp_path, 980) == 0
    found = json.loads((tmp_path / "capacity_h200.json").read_text())
    assert found["rows"] == {
        "plain": {"device_tokens": 64_000},
        "ours_elastic": {"device_tokens": 980 * 64, "logical_tokens": 128_000},
        "ours_open": {"device_tokens": 981 * 64, "logical_tokens": 128_000},
        "ours": {"device_tokens": 900 * 64, "logical_tokens": 128_000},
    }
    assert found["share_of_plain"] == {"plain": 1.0, "ours_elastic": 0.98, "ours_open": 0.981, "ours": 0.9}
    assert _run(monkeypatch, tmp_path, 979) == 1
    assert _run(monkeypatch, tmp_path, 980, open_pages=900) == 1, "the default has not turned it on"
    assert _run(monkeypatch, tmp_path, 980, plain=None) == 1


def test_without_plain_there_is_nothing_to_compare(tmp_path: pathlib.Path) -> None:
    """Goal: refused before a server starts. Method: other orders of --systems."""
    for systems in ("ours", "ours,plain", "plain,none"):
        with pytest.raises(SystemExit):
            verify_capacity.parse_arguments(["model", "--out", str(tmp_path), "--commit", "abc", "--systems", systems])
