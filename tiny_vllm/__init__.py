"""tiny-vllm: a small, fast LLM inference engine.

Importing this package is quick; torch is loaded when `LLM` is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiny_vllm.config import EngineConfig
from tiny_vllm.errors import (
    CapacityError,
    ConfigError,
    EngineDead,
    ModelError,
    RequestError,
    TinyVLLMError,
)
from tiny_vllm.outputs import (
    ChoiceDelta,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    RequestUpdate,
)
from tiny_vllm.types import SamplingParams

if TYPE_CHECKING:
    from tiny_vllm.llm import LLM

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CapacityError",
    "ChoiceDelta",
    "CompletionOutput",
    "ConfigError",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineConfig",
    "EngineDead",
    "Logprob",
    "ModelError",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "RequestUpdate",
    "SamplingParams",
    "TinyVLLMError",
]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from tiny_vllm.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
