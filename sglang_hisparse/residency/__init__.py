"""The residency protocol: pure Python over numpy, no torch, no SGLang."""

from sglang_hisparse.residency.coordinator import ResidencyCoordinator
from sglang_hisparse.residency.device_pages import DevicePages, Owner
from sglang_hisparse.residency.policy import SpillPolicy
from sglang_hisparse.residency.types import (
    Mirroring,
    PageState,
    Residency,
    ResidencyLimits,
    ResidencyMode,
    ResidencyPolicy,
    StepPlan,
)

__all__ = [
    "DevicePages",
    "Mirroring",
    "Owner",
    "PageState",
    "Residency",
    "ResidencyCoordinator",
    "ResidencyLimits",
    "ResidencyMode",
    "ResidencyPolicy",
    "SpillPolicy",
    "StepPlan",
]
