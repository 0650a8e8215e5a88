"""Chooses the library by where the tensors are; the only place that knows both exist."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_hisparse.kernels.build import load_cpu, load_cuda

if TYPE_CHECKING:
    import torch
    from tvm_ffi import Module


def library_of(tensor: torch.Tensor) -> Module:
    """The CUDA library for a CUDA tensor, else the CPU library; compiled on first use (KernelBuildError)."""
    return load_cuda() if tensor.is_cuda else load_cpu()
