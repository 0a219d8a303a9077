"""What the commands share: a loaded engine, a stream printed as it grows, and Ctrl-C between two steps."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tiny_vllm.cli.options import engine_config, sampling_params
from tiny_vllm.errors import ModelError, RequestError
from tiny_vllm.types import FinishReason, SamplingParams

if TYPE_CHECKING:
    from tiny_vllm.llm import LLM
    from tiny_vllm.outputs import RequestOutput, RequestUpdate


def open_llm(args: argparse.Namespace) -> LLM:
    """Load the model of a command line. Wrong options are refused before anything heavy is imported."""
    config = engine_config(args)
    from tiny_vllm.llm import LLM

    return LLM(**asdict(config))


def check_takes_text(llm: LLM) -> None:
    """Raises RequestError for a model to which nothing can be said on a command line."""
    if llm.tokenizer is None:
        raise RequestError("this model has no tokenizer, and takes no text", hint="name one with --tokenizer")


def sampling_for(llm: LLM, args: argparse.Namespace) -> SamplingParams:
    """The sampling options of a command line. What it leaves out is as the model recommends, if it does."""
    # Not get_default_sampling_params: in it a temperature of 1 that is recommended looks like none at all.
    return sampling_params(args, llm._sampling_defaults)


def print_stream(
    updates: Iterable[RequestUpdate],
    *,
    should_stop: Callable[[], bool] = lambda: False,
    arrange: Callable[[str], str] = lambda text: text,
) -> RequestOutput:
    """Write the first choice's text to stdout as it grows, and a line end. Returns the whole output.

    should_stop: asked after every update. arrange: changes each piece before it is written.
    """
    for update in updates:
        sys.stdout.write(arrange(update.text))
        sys.stdout.flush()
        if should_stop():
            break
    print(flush=True)
    return update.output


def check_usable(outputs: Iterable[RequestOutput]) -> None:
    """Raise ModelError if a choice ended because the model gave no usable logits."""
    if any(choice.finish_reason == FinishReason.ERROR for output in outputs for choice in output.outputs):
        raise ModelError(
            "the model gave no usable numbers, so the text ends there",
            hint="check its weights; one made for bfloat16 can overflow in float16: try --dtype bfloat16",
        )


class Interrupt:
    """Whether Ctrl-C was pressed."""

    requested = False


@contextmanager
def deferred_interrupt() -> Iterator[Interrupt]:
    """Note the first Ctrl-C instead of raising it: no engine step is torn apart. A second one raises."""
    interrupt = Interrupt()

    def note(signal_number: int, frame: Any) -> None:
        if interrupt.requested:
            raise KeyboardInterrupt
        interrupt.requested = True

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, previous)
