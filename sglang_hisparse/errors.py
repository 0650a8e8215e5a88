"""Exceptions of this package; each is raised only where a person can act on it."""


class HiSparseError(Exception):
    """Base of every error that this package raises."""


class ConfigError(HiSparseError, ValueError):
    """A setting cannot be accepted. Names the key, the value and what is allowed; raised before weights load."""


class InvariantError(HiSparseError, AssertionError):
    """A residency invariant (I1..I9 of ARCHITECTURE.md) does not hold: a bug of ours, never of the user."""


class KernelBuildError(HiSparseError, RuntimeError):
    """The CUDA or C++ sources could not be compiled; carries the compiler's output and the remedy."""
