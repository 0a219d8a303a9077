"""Everything one server holds: the engine, the model's facts, metrics, limits, and whether it is draining."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiny_vllm.config import EngineConfig
from tiny_vllm.errors import EngineDead, shown
from tiny_vllm.serving.admission import Admission, Door
from tiny_vllm.serving.config import ServerConfig
from tiny_vllm.serving.engine_client import ENGINE_COMMAND, EngineClient
from tiny_vllm.serving.errors import ApiError
from tiny_vllm.serving.messages import Ready
from tiny_vllm.serving.metrics import Metrics
from tiny_vllm.serving.openai_requests import RequestMaker
from tiny_vllm.text.request_builder import RequestBuilder
from tiny_vllm.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """name: as the API calls it. aliases: other names for it. vocab_size: rows of the embedding.

    hidden_size: values of an embedding. kv_values_per_token: K and V over all layers, in heads
    of head_dim. sampling_defaults: values for what requests leave out. recommendation: the same in words, and
    where it is from; None if there is none.
    """

    name: str
    aliases: frozenset[str]
    vocab_size: int
    hidden_size: int
    kv_values_per_token: int
    head_dim: int
    tokenizer: Tokenizer | None
    sampling_defaults: Mapping[str, Any]
    recommendation: str | None


class Service:
    """The state of a server. engine_config: as the user gave it. engine_command: see EngineClient.

    is_draining: told to stop, so /ready fails; the door is shut then or, with drain_delay, some time later.
    """

    def __init__(
        self,
        config: ServerConfig,
        engine_config: EngineConfig,
        model: ServedModel,
        *,
        engine_command: Sequence[str] = ENGINE_COMMAND,
        log_level: int = logging.WARNING,
    ) -> None:
        self.config = config
        self.engine_config = engine_config
        self.model = model
        self.created = int(time.time())
        self.is_draining = False
        self.must_end_at_once = False
        self.num_viewers = 0
        self.has_been_ready = False
        self.metrics = Metrics(
            model.name,
            lambda: self.engine.stats,
            lambda: self.engine.num_restarts,
        )
        self.door = Door()
        self.admission = Admission(config.max_requests, config.max_requests_per_key)
        self.engine = EngineClient(
            engine_config,
            model.tokenizer,
            command=engine_command,
            restart=config.restart_engine,
            log_level=log_level,
            on_ready=self._take_ready,
            observe=self.metrics.observe,
            on_lost=self.metrics.forget,
        )
        self._maker: RequestMaker | None = None

    @property
    def maker(self) -> RequestMaker:
        """Makes requests for the running engine. Raises EngineDead while there is none."""
        self.engine.check_ready()
        assert self._maker is not None
        return self._maker

    @property
    def max_model_len(self) -> int | None:
        return None if self.engine.ready is None else self.engine.ready.options["max_model_len"]

    def check_health(self) -> None:
        """Raises EngineDead unless the engine's loop runs."""
        self.engine.check_ready()
        silence = time.monotonic() - self.engine.last_heard
        if silence > self.config.stall_timeout:
            raise EngineDead(
                f"the engine has given no sign of life for {silence:.0f} seconds",
                hint="the limit is the server option stall_timeout",
            )

    def check_num_choices(self, num_prompts: int, n: int) -> None:
        """Raises ApiError for n choices of each prompt if those are more in all than a request may have, or
        than slots and queue could ever hold."""
        options = {} if self.engine.ready is None else self.engine.ready.options
        number, limit = num_prompts * n, max(self.config.max_prompts, options.get("max_n", 1))
        problem, names = f"but may have {limit}", "max_prompts and max_n"
        if number <= limit:
            max_queue_len = options.get("max_queue_len")
            if max_queue_len is None or number <= max_queue_len + options["max_num_seqs"]:
                return
            problem = f"but slots and queue hold {max_queue_len + options['max_num_seqs']}"
            names = "max_num_seqs and max_queue_len"
        what, advice = ("choices of all its prompts", ", or lower n") if n > 1 else ("answers", "")
        raise ApiError(
            400,
            f"the request asks for {number} {what}, {problem}\n"
            f"hint: send fewer prompts at once{advice}; the limits are {names}",
            param="n" if n > 1 else None,
        )

    def check_model(self, name: str | None) -> None:
        """Raises ApiError for a model that is not served here."""
        if name is None or name == self.model.name or name in self.model.aliases:
            return
        raise ApiError(
            404,
            f"the model {shown(name)} does not exist\nhint: this server has {self.model.name!r}",
            param="model",
            code="model_not_found",
        )

    def _take_ready(self, ready: Ready) -> None:
        self.has_been_ready = True
        builder = request_builder(self.model.tokenizer, self.model.vocab_size, ready.options)
        self._maker = RequestMaker(
            builder,
            self.model.tokenizer,
            self.config.max_prompts,
            self.config.max_stop_strings,
            self.model.sampling_defaults,
        )
        logger.info("the engine is ready")


def request_builder(
    tokenizer: Tokenizer | None, vocab_size: int, options: Mapping[str, Any]
) -> RequestBuilder:
    """options: the resolved EngineConfig by field."""
    return RequestBuilder(
        tokenizer,
        vocab_size=vocab_size,
        max_model_len=options["max_model_len"],
        max_logprobs=options["max_logprobs"],
        max_n=options["max_n"],
        ids_hint="send token ids as the prompt of /v1/completions",
    )
