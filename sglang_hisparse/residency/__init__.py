"""The residency protocol: pure Python over numpy, no torch, no SGLang."""

from sglang_hisparse.residency.border import Border, Progress, border_steps
from sglang_hisparse.residency.coordinator import ResidencyCoordinator
from sglang_hisparse.residency.device_pages import DevicePages, Owner
from sglang_hisparse.residency.policy import SpillPolicy
from sglang_hisparse.residency.types import (
    BorderStep,
    Mirroring,
    PageState,
    Residency,
    ResidencyLimits,
    ResidencyMode,
    ResidencyPolicy,
    StepPlan,
)

__all__ = [
    "Border",
    "BorderStep",
    "DevicePages",
    "Mirroring",
    "Owner",
    "PageState",
    "Progress",
    "Residency",
    "ResidencyCoordinator",
    "ResidencyLimits",
    "ResidencyMode",
    "ResidencyPolicy",
    "SpillPolicy",
    "StepPlan",
    "border_steps",
]
