"""What /v1/embeddings answers: a vector for each prompt, as numbers or in base64."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tiny_vllm.engine.embedding import EmbeddingParams
from tiny_vllm.outputs import RequestOutput
from tiny_vllm.serving.schemas import EmbeddingBody
from tiny_vllm.types import Pooling


def embedding_params(body: EmbeddingBody, pooling: Pooling) -> EmbeddingParams:
    """What a body asks for. pooling: that of the server."""
    return EmbeddingParams(
        pooling=body.pooling or pooling, normalize=body.normalize is not False, dimensions=body.dimensions
    )


@dataclass(frozen=True, slots=True)
class EmbeddingFormat:
    """/v1/embeddings."""

    params: EmbeddingParams
    is_base64: bool
    model_name: str

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": self._embedding(output)}
                for index, output in enumerate(outputs)
            ],
            "model": self.model_name,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }

    def _embedding(self, output: RequestOutput) -> list[float] | str:
        assert output.pooled is not None
        values = self.params.values(output.pooled)
        if self.is_base64:
            return base64.b64encode(values.astype("<f4").tobytes()).decode()
        return values.tolist()
