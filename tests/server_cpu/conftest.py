"""Makes tests/harness importable for the tests of this folder, wherever pytest is started from."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
