"""Entry point of the SGLang plugin (group `sglang.srt.plugins`, name `hisparse`).

SGLang calls `register` once in each of its processes. It either registers every hook, or, where that cannot work (another
SGLang version, a target that has moved), one hook that refuses `--enable-hisparse` with the reason: SGLang only logs a
plugin that fails and would then run its own HiSparse, or a mixture of both. Servers without `--enable-hisparse` are not
touched either way; SGLANG_PLUGINS can leave the plugin out, which gives SGLang's own behaviour.
"""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from sglang_hisparse.errors import ConfigError

logger = logging.getLogger(__name__)

TESTED_SGLANG = "0.5.23"


def register() -> None:
    """Register the hooks with SGLang."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    reason = _why_not()
    if reason is not None:
        logger.warning("sglang-hisparse is not active: %s", reason)
        HookRegistry.register("sglang.srt.arg_groups.hisparse_hook.validate_hisparse", _refusal(reason), HookType.AROUND)
        return
    from sglang_hisparse.hooks import HOOKS

    for hook in HOOKS:
        HookRegistry.register(hook.path, hook.function, HookType[hook.kind])


def _why_not() -> str | None:
    """Why the hooks cannot be registered in this process; None when they can."""
    installed = version("sglang")
    if installed != TESTED_SGLANG:
        return f"SGLang {installed} is installed; sglang-hisparse is made for {TESTED_SGLANG}"
    try:
        from sglang_hisparse.hooks import HOOKS

        for hook in HOOKS:
            pkgutil.resolve_name(hook.path)
    except (ImportError, AttributeError) as error:
        return f"a place that it hooks is not there: {error}"
    return None


def _refusal(reason: str) -> Callable[..., None]:
    def refuse(original: Callable[[Any], None], server_args: Any) -> None:
        if server_args.enable_hisparse:
            raise ConfigError(
                f"--enable-hisparse: {reason}. Install that SGLang, or set SGLANG_PLUGINS to leave the plugin out "
                "and run SGLang's own HiSparse."
            )
        original(server_args)

    return refuse
