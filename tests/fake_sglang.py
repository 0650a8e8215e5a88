"""A process that answers like an SGLang server, for the tests of the serving scripts. It has no model and no GPU.

`install` writes it as a package `sglang`, which the scripts then start as they start the real one. Greedy: an answer depends
on the prompt alone. It caches prefixes, aborts, pauses, keeps a statistics file and "profiles": the traces that it writes lie in
FAKE_TRACES. FAKE_* variables make it misbehave.
"""

import random
import socket
from pathlib import Path

PORTS_TOGETHER = 110  # the most that a script counts up from its --port, and some

SOURCE = """
import http.server, json, os, pathlib, signal, sys, threading, time, traceback

port = int(sys.argv[sys.argv.index("--port") + 1])
stats = pathlib.Path(os.environ["SGLANG_HISPARSE_STATS_FILE"]); stem = stats.stem
plugin = os.environ["SGLANG_PLUGINS"] == "hisparse"
radix = "--disable-radix-cache" not in sys.argv
broken = os.environ.get("FAKE_BROKEN", "")
if broken and broken in stats.name:
    print("out of patience"); sys.exit(7)
def number(name, default=0):
    return int(os.environ.get(name, default)) if plugin else default
wrong_after = number("FAKE_WRONG_AFTER", 10**9)
delay = float(os.environ.get("FAKE_DELAY", 0))
lock, running, aborted, cached = threading.RLock(), {}, set(), []
resume = threading.Event(); resume.set()
served, profile = 0, {}
def write_trace(stage=""):
    # SGLang names a trace by the profile's id, the rank and, where it profiles by stage, the stage.
    name = profile["profile_id"].rsplit("-", 1)
    trace = pathlib.Path(os.environ["FAKE_TRACES"], "{}-{}.json.gz".format(*name)).read_bytes()
    out = pathlib.Path(profile["output_dir"]); out.mkdir(parents=True, exist_ok=True)
    (out / "{}-TP-0{}.trace.json.gz".format(profile["profile_id"], stage)).write_bytes(trace)
    print("profile", profile["profile_id"], "of", served - profile["first"], "requests"); profile.clear()
def write_stats(resident):
    count = {"pages_spilled": served, "rows_fetched": 10 * served, "audited_rows": served, "errors": 0,
             "mismatches": number("FAKE_MISMATCHES") if served > 40 else 0,
             "device_pages_resident": resident, "device_pages_hot": 0}
    for rank in range(number("FAKE_RANKS", 1)):
        file = stats.with_name(f"{stem}.rank{rank}.json") if rank else stats
        partial = file.with_suffix(".partial"); partial.write_text(json.dumps(count)); partial.replace(file)
store = os.environ.get("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR")
store = pathlib.Path(store, "cached.json") if store and plugin and not number("FAKE_FORGETS") else None
if store and store.exists(): cached += json.loads(store.read_text())
def end(*_):
    time.sleep(float(number("FAKE_SLOW_EXIT")))
    write_stats(number("FAKE_LEAK")); os._exit(0)
signal.signal(signal.SIGTERM, end)

class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args): pass
    def answer(self, body, status=200):
        self.send_response(status); self.end_headers(); self.wfile.write(body)
    def do_GET(self): self.answer(b"ok")
    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        request = json.loads(body) if body else {}
        if self.path == "/generate": return self.generate(request)
        with lock:
            if self.path == "/flush_cache":
                if running: return self.answer(b"busy", 400)
                cached.clear()
            elif self.path == "/abort_request": aborted.add(request["rid"])
            elif self.path == "/pause_generation":
                resume.clear()
                if request["mode"] == "abort": aborted.update(running)
            elif self.path == "/continue_generation": resume.set()
            elif self.path == "/start_profile":
                if profile or os.environ.get("FAKE_NO_PROFILE"): return self.answer(b"in progress", 500)
                profile.update(request, first=served)
            elif self.path == "/stop_profile": write_trace()
            elif self.path == "/freeze_gc": print("gc frozen after", served, "requests")
        self.answer(b"done")
    def generate(self, request):
        global served
        prompt, count = request["input_ids"], request["sampling_params"]["max_new_tokens"]
        rid = request.get("rid", f"own-{id(request)}")
        with lock:
            served += 1; mine = served; running[rid] = True
            hit = max((common(prompt, other) for other in cached), default=0) if radix else 0
            hit = min(hit, len(prompt) - 1)
        done = b""
        try:
            if self.stream(prompt, count, rid, hit, mine): done = b"data: [DONE]\\n\\n"
        except (BrokenPipeError, ConnectionResetError):
            pass
        with lock:
            running.pop(rid); write_stats(1)
            whole = served - profile.get("first", served) >= int(os.environ.get("SGLANG_PROFILE_BY_STAGE_DECODE_MIN_BS", 0))
            if profile.get("profile_by_stage") and whole and not running: write_trace("-DECODE")
        try:
            self.wfile.write(done)
        except (BrokenPipeError, ConnectionResetError):
            pass
        if number("FAKE_RAISES") and mine % number("FAKE_RAISES") == 0: raise RuntimeError("lost a page")
    def stream(self, prompt, count, rid, hit, mine):
        self.send_response(200); self.end_headers()
        tokens, first = [], sum(prompt) * 31
        drops = number("FAKE_DROPS") and mine % number("FAKE_DROPS") == 0
        for step in range(count):
            resume.wait(); time.sleep(delay)
            if drops and step: return False
            reason = None
            with lock:
                if rid in aborted: reason = {"type": "abort", "message": "Aborted"}
            if reason is None:
                tokens.append((first + 7 * step + (step >= wrong_after)) % 32768)
                if step == count - 1: reason = {"type": "length", "length": count}
            meta = {"prompt_tokens": len(prompt), "cached_tokens": hit, "num_retractions": 1, "finish_reason": reason}
            self.wfile.write(b"data: " + json.dumps({"output_ids": tokens, "meta_info": meta}).encode() + b"\\n\\n")
            self.wfile.flush()
            if reason: break
        with lock:
            cached.append(prompt + tokens[:-1])
            if store: store.write_text(json.dumps(cached))
        return True
def common(left, right):
    same = 0
    for one, other in zip(left, right):
        if one != other: break
        same += 1
    return same
class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 256
    def handle_error(self, request, client_address):
        # A client that hangs up is no failure of a server; of any other, one write, which no other thread's can split.
        if not isinstance(sys.exc_info()[1], ConnectionError):
            sys.stderr.write(traceback.format_exc())
Server(("127.0.0.1", port), Handler).serve_forever()
"""


def install(folder: Path) -> Path:
    """Write the package below `folder`; returns the folder to be put on the path."""
    package = folder / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "launch_server.py").write_text(SOURCE)
    return folder


def free_port() -> int:
    """The first of `PORTS_TOGETHER` ports that nobody holds now: the scripts give their servers ports counted from one.

    They lie below those that the system gives to outgoing connections (32,768 and above), which might take one of them
    between here and the server's start. Raises OSError when there are none.
    """
    for first in random.SystemRandom().sample(range(10_000, 32_768 - PORTS_TOGETHER), 100):
        if block_is_free(first):
            return first
    raise OSError(f"no {PORTS_TOGETHER} free ports in a row between 10,000 and 32,767")


def block_is_free(first: int) -> bool:
    """Whether nobody holds any of the `PORTS_TOGETHER` ports from `first` on."""
    return all(map(_is_free, range(first, first + PORTS_TOGETHER)))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do: what a closed connection leaves behind for a minute holds no port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def arguments(folder: Path) -> list[str]:
    """Install below `folder`; the scripts' arguments that say where everything is."""
    install(folder / "site")
    places = {"--site": "site", "--plugin": "plugin", "--cache": "cache"}
    return [
        *(word for flag, name in places.items() for word in (flag, str(folder / name))),
        *("--port", str(free_port()), "--commit", "abc"),
    ]
