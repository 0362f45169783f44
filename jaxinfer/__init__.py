"""jaxinfer: a JAX/XLA inference engine for transformer language models on TPU, GPU and CPU.

Owns the public names. Each is loaded when it is first used, so importing one part never loads the
whole: `import jaxinfer` alone imports neither jax nor anything else of the package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxinfer import compute
    from jaxinfer.checkpoint.loading import load
    from jaxinfer.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
    from jaxinfer.engine.async_llm import AsyncLLM
    from jaxinfer.engine.engine import Engine
    from jaxinfer.engine.llm import LLM
    from jaxinfer.engine.outputs import RequestOutput
    from jaxinfer.sampling_params import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "CacheConfig",
    "Engine",
    "EngineConfig",
    "ModelConfig",
    "ParallelConfig",
    "RequestOutput",
    "SamplingParams",
    "__version__",
    "compute",
    "load",
]

# Where each public name lives; `compute` is a package, not a name in one.
_HOMES = {
    "LLM": "jaxinfer.engine.llm",
    "AsyncLLM": "jaxinfer.engine.async_llm",
    "CacheConfig": "jaxinfer.config",
    "Engine": "jaxinfer.engine.engine",
    "EngineConfig": "jaxinfer.config",
    "ModelConfig": "jaxinfer.config",
    "ParallelConfig": "jaxinfer.config",
    "RequestOutput": "jaxinfer.engine.outputs",
    "SamplingParams": "jaxinfer.sampling_params",
    "load": "jaxinfer.checkpoint.loading",
}


def __getattr__(name: str) -> Any:
    """The public name, from the module that owns it (PEP 562)."""
    if name == "compute":
        return importlib.import_module("jaxinfer.compute")
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxinfer' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The public names and the submodules imported so far."""
    return sorted(set(__all__) | set(globals()))
