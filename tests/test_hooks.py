"""Goal: every place that we hook is there and is ours afterwards. Method: SGLang's own registry, in a process of its own."""

from __future__ import annotations

import inspect
import pkgutil

import pytest
from child_process import run_python
from sglang.srt.plugins.hook_registry import HookType

from sglang_hisparse.hooks import HOOKS, Hook

# ---- the table, without applying it ----------------------------------------------------------------------------------


def call_like(function: object) -> tuple[list[object], dict[str, object]]:
    """Arguments with which SGLang may call `function`: every parameter given, keyword-only ones by name."""
    positional, keywords = [], {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            positional.append(object())
        elif parameter.kind is parameter.KEYWORD_ONLY:
            keywords[parameter.name] = object()
    return positional, keywords


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.target)
def test_the_target_exists_and_the_kind_fits(hook: Hook) -> None:
    """Goal: no hook misses its target or its signature in SGLang 0.5.23. Method: bind a call of the target to the hook."""
    target = pkgutil.resolve_name(hook.path)
    target = inspect.unwrap(target)  # other tests of this process may have applied the hooks
    assert hook.why and HookType[hook.kind]
    if isinstance(target, type) or isinstance(hook.function, type):
        assert hook.kind == "REPLACE" and isinstance(hook.function, type)
        return
    positional, keywords = call_like(target)
    extra = {"AROUND": [target], "AFTER": [None], "BEFORE": [], "REPLACE": []}[hook.kind]
    inspect.signature(hook.function).bind(*extra, *positional, **keywords)


def test_targets_are_hooked_once() -> None:
    """Goal: one table, one entry a target. Method: names of the table."""
    assert len({hook.target for hook in HOOKS}) == len(HOOKS) > 15


def test_replaced_classes_are_subclasses_or_refuse_others() -> None:
    """Goal: isinstance checks in SGLang see our pool and allocator. Method: bases of the classes put in their places."""
    classes = {hook.target.rsplit(".", 1)[1]: hook.function for hook in HOOKS if isinstance(hook.function, type)}
    assert set(classes) == {"HiSparseCoordinator", "HiSparseTokenToKVPoolAllocator", "HiSparseDSATokenToKVPool"}
    for name in ("HiSparseTokenToKVPoolAllocator", "HiSparseDSATokenToKVPool"):
        assert name in [base.__name__ for base in classes[name].__mro__[1:]]


# ---- applied, in a process of its own --------------------------------------------------------------------------------


def test_all_hooks_take_and_a_missing_one_is_named() -> None:
    """Goal: what SGLang's scheduler process uses is ours, or the start is refused. Method: load plugins with one hook lost."""
    printed = run_python(
        """
        import sglang.srt.managers.scheduler as scheduler  # as in a server: SGLang's modules are loaded first
        from sglang.srt.mem_cache import allocation, kv_cache_configurator, memory_pool, registry
        from sglang.srt.managers import hisparse_coordinator, schedule_batch
        from sglang.srt.plugins import load_plugins
        from sglang.srt.plugins.hook_registry import HookRegistry

        lost, register = "sglang.srt.mem_cache.allocation.alloc_for_extend", HookRegistry.register
        HookRegistry.register = lambda target, *rest, **more: target == lost or register(target, *rest, **more)
        load_plugins()
        from sglang_hisparse import hooks
        from sglang_hisparse.errors import HiSparseError
        try:
            hooks.verify()
        except HiSparseError as error:
            print("refused:", error)
        HookRegistry.register = register
        from sglang.srt.plugins.hook_registry import HookType
        hook = next(hook for hook in hooks.HOOKS if hook.path == lost)
        HookRegistry.register(hook.path, hook.function, HookType[hook.kind])
        HookRegistry.apply_hooks()
        hooks.verify()
        print("verified", len(hooks.HOOKS))

        # Names that SGLang's modules imported before us are ours as well.
        assert scheduler.HiSparseCoordinator is hooks.HiSparseRuntime
        assert hisparse_coordinator.HiSparseTokenToKVPoolAllocator is hooks.HiSparseAllocator
        assert kv_cache_configurator.HiSparseTokenToKVPoolAllocator is hooks.HiSparseAllocator
        assert kv_cache_configurator.HiSparseDSATokenToKVPool is hooks.HiSparsePool
        assert schedule_batch.alloc_for_extend is allocation.alloc_for_extend
        assert schedule_batch.alloc_for_extend.__wrapped__.__module__ == allocation.__name__
        assert allocation.alloc_for_decode.__wrapped__.__module__ == allocation.__name__

        # The one release is hooked on SGLang's pool class, and subclasses inherit it.
        released = []
        pool = memory_pool.ReqToTokenPool(4, 64, "cpu", False)
        pool.free_rows(pool.alloc_rows(1))
        class Runtime:
            release_slots = staticmethod(released.extend)
        pool.hisparse_runtime = Runtime
        pool.free_rows(pool.alloc_rows(2))
        assert len(released) == 2

        # A hook that another plugin took away afterwards is noticed too.
        allocation.alloc_for_extend = schedule_batch.alloc_for_extend.__wrapped__
        try:
            hooks.verify()
        except HiSparseError as error:
            print("refused again:", error)
        """,
        SGLANG_PLUGINS="hisparse",
    )
    lines = printed.splitlines()
    expected = "SGLang did not take these hooks: sglang.srt.mem_cache.allocation.alloc_for_extend; refusing"
    assert any(line.startswith("refused: " + expected) for line in lines), printed
    assert f"verified {len(HOOKS)}" in lines
    assert any(line.startswith("refused again: " + expected) for line in lines), printed
