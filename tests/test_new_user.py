"""Goal: a newcomer can type what README says. Method: the commands of its shell blocks, run as they stand.

Installation and the test suite are what CI does around this test, in a fresh environment; a server needs a GPU.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
ELSEWHERE = ("pip install", "python -m sglang.launch_server", "pytest")
LIMIT_SECONDS = 240  # of one command; ten minutes for all, on a machine that does nothing else
PLACES = ("scripts", "configs")


def commands() -> list[str]:
    """Every command of README's shell blocks that needs neither the network nor a GPU, in order."""
    found = []
    for block in re.findall(r"```bash\n(.*?)\n```", README, flags=re.DOTALL):
        found += [line.strip() for line in block.replace("\\\n", " ").splitlines() if line.strip()]
    return [command for command in found if not command.startswith(ELSEWHERE)]


def launch_scripts() -> list[str]:
    """Dry runs of the launch scripts that README names."""
    return [f"bash scripts/{name} --dry-run" for name in sorted(set(re.findall(r"\blaunch_\w+\.sh", README)))]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a checkout shows to the commands; what they write lands here."""
    folder = tmp_path_factory.mktemp("newcomer")
    for place in PLACES:
        shutil.copytree(ROOT / place, folder / place, ignore=shutil.ignore_patterns("__pycache__", "results"))
    return folder


def run(command: str, home: Path) -> tuple[str, float]:
    """Output and seconds; the command must succeed."""
    bin_folder = Path(sys.executable).parent
    environment = dict(os.environ) | {"PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}", "PYTHON": "python3"}
    start = time.monotonic()
    done = subprocess.run(
        ["bash", "-c", command], cwd=home, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout, time.monotonic() - start


def test_the_path_has_its_stations() -> None:
    """Goal: the test below runs what it should. Method: commands that the path must have."""
    starts = {" ".join(command.split()[:2]) for command in commands()}
    assert {"sglang-hisparse check", "sglang-hisparse plan", "sglang-hisparse replay"} <= starts
    assert len(launch_scripts()) == 3
    assert any("--plot" in command for command in commands())


@pytest.mark.skipif(shutil.which("sglang-hisparse", path=str(Path(sys.executable).parent)) is None,
                    reason="the package is on the path, but not installed")  # fmt: skip
@pytest.mark.parametrize("command", list(dict.fromkeys([*commands(), *launch_scripts()])))
def test_a_command_of_readme_works_as_it_stands(command: str, home: Path) -> None:
    """Goal: nothing in README fails a newcomer without a GPU. Method: exit status 0, its output, and the files it promises."""
    output, _ = run(command, home)
    assert output.strip()
    if "--plot" in command:
        pictures = list((home / "plots").glob("*.png"))
        assert len(pictures) >= 3 and all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)
    if "--dry-run" in command:
        assert "sglang.launch_server" in output
