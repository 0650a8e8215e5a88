"""Goal: active, refusing or absent, never a mixture. Method: SGLang's plugin loader, other versions, plugins left out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from child_process import run_python

from sglang_hisparse import hooks, plugin
from sglang_hisparse.errors import ConfigError

CHILD = """
from types import SimpleNamespace
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
import sys

# 1. SGLANG_PLUGINS names another plugin: SGLang's own classes, and no code of ours is loaded.
load_plugins()
from sglang.srt.arg_groups import hisparse_hook
from sglang.srt.managers.hisparse_coordinator import HiSparseCoordinator
from sglang.srt.mem_cache.allocator.hisparse import HiSparseTokenToKVPoolAllocator
from sglang.srt.mem_cache.hisparse_memory_pool import HiSparseDSATokenToKVPool
for thing in (HiSparseCoordinator, HiSparseTokenToKVPoolAllocator, HiSparseDSATokenToKVPool, hisparse_hook.validate_hisparse):
    assert thing.__module__.startswith("sglang.srt.") and not hasattr(thing, "__wrapped__"), thing
assert not HookRegistry._hooks and "sglang_hisparse.plugin" not in sys.modules
print("left out")

# 2. Another SGLang is installed: one hook, which refuses the flag with one line, and nothing else is touched.
import importlib.metadata
version = importlib.metadata.version
importlib.metadata.version = lambda name: "0.5.99" if name == "sglang" else version(name)
from sglang_hisparse import plugin
plugin.register()
HookRegistry.apply_hooks()
assert list(HookRegistry._patched) == ["sglang.srt.arg_groups.hisparse_hook.validate_hisparse"]
assert "sglang_hisparse.hooks" not in sys.modules
hisparse_hook.validate_hisparse(SimpleNamespace(enable_hisparse=False))
try:
    hisparse_hook.validate_hisparse(SimpleNamespace(enable_hisparse=True))
except ValueError as error:
    print(type(error).__name__, str(error))
"""


def test_left_out_or_wrong_version() -> None:
    """Goal: SGLang's own behaviour, or a clear refusal. Method: both in one fresh process, through SGLang's loader."""
    lines = run_python(CHILD, SGLANG_PLUGINS="another").splitlines()
    assert "left out" in lines
    assert lines[-1] == (
        "ConfigError --enable-hisparse: SGLang 0.5.99 is installed; sglang-hisparse is made for 0.5.23. Install that SGLang, "
        "or set SGLANG_PLUGINS to leave the plugin out and run SGLang's own HiSparse."
    )


def test_nothing_speaks_against_this_sglang() -> None:
    """Goal: the tested version is the one installed, and every target is found. Method: ask the plugin."""
    assert plugin._why_not() is None


def test_a_target_that_has_moved_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a patched SGLang of the right version is refused too. Method: a hook on a function that is not there."""
    moved = hooks.Hook("managers.scheduler.Scheduler.no_such_method", "AFTER", lambda *_: None, "for the test")
    monkeypatch.setattr(hooks, "HOOKS", (*hooks.HOOKS, moved))
    assert "no_such_method" in plugin._why_not()


def test_the_refusal_asks_only_those_who_want_hisparse() -> None:
    """Goal: other servers do not notice. Method: the refusing hook with and without the flag."""
    seen = []
    refuse = plugin._refusal("the moon is full")
    refuse(seen.append, SimpleNamespace(enable_hisparse=False))
    assert len(seen) == 1
    with pytest.raises(ConfigError, match="^--enable-hisparse: the moon is full. ") as caught:
        refuse(seen.append, SimpleNamespace(enable_hisparse=True))
    assert len(seen) == 1 and "\n" not in str(caught.value)
