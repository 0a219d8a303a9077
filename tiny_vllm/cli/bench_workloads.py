"""What the throughput benchmarks ask for: seeded requests of stated lengths, and when they arrive.

A workload is named on the command line:

    nano-vllm       256 prompts of 100 to 1,024 tokens, 100 to 1,024 new ones, both uniform: with seed 0
                    nano-vllm's own benchmark, request for request
    sharegpt-like   256 requests with log-normal lengths, clipped to 4 to 1,024 tokens: prompts with median 90
                    and sigma 1.3, outputs with median 130 and sigma 1.0
    shared-prefix   64 prompts of 1,024 tokens, nine tenths of each the same, 64 new ones
    256x128+512     256 prompts of 128 tokens, 512 new ones each; any numbers

Nothing of the engine is imported, so that a peer's benchmark can ask for the same.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tiny_vllm.errors import ConfigError

NANO_VLLM_LENGTHS = (100, 1024)
NANO_VLLM_LAST_TOKEN = 10_000
LOG_NORMAL_LIMITS = (4, 1024)
LOG_NORMAL_PROMPT = (90.0, 1.3)
LOG_NORMAL_OUTPUT = (130.0, 1.0)
SHARED_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request. output_len: tokens to generate, whatever they are. priority: smaller is more urgent.
    arrival: seconds after the start."""

    prompt_token_ids: tuple[int, ...]
    output_len: int
    priority: int = 0
    arrival: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """shares_prefix: whether a prefix cache can help at all."""

    name: str
    items: tuple[WorkItem, ...]
    temperature: float
    shares_prefix: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(item.prompt_token_ids) for item in self.items)

    @property
    def num_output_tokens(self) -> int:
        return sum(item.output_len for item in self.items)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return max(len(item.prompt_token_ids) + item.output_len for item in self.items)

    @property
    def mean_context(self) -> float:
        """Tokens that a new token attends to, on average over all of them."""
        total = sum(
            item.output_len * (len(item.prompt_token_ids) + (item.output_len + 1) / 2) for item in self.items
        )
        return total / self.num_output_tokens


def make_workload(name: str, vocab_size: int, *, num_prompts: int | None = None, seed: int = 0) -> Workload:
    """The workload of a name. num_prompts: instead of its own number. seed: of lengths and tokens.

    Raises ConfigError for a name that is none.
    """
    if num_prompts is not None and num_prompts < 1:
        raise ConfigError(
            f"num_prompts is {num_prompts}, but must be at least 1",
            hint="leave it out for the workload's own",
        )
    shape = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)\+([1-9]\d*)", name)
    if shape is not None:
        count, input_len, output_len = map(int, shape.groups())
        return fixed(num_prompts or count, input_len, output_len, vocab_size, seed)
    if name not in NAMED:
        raise ConfigError(
            f"the workload is {name!r}, but must be one of {', '.join(NAMED)}, or a shape",
            hint="a shape is prompts x prompt tokens + new tokens, such as 256x128+512",
        )
    count, make = NAMED[name]
    return make(num_prompts or count, vocab_size, seed)


def nano_vllm(count: int, vocab_size: int, seed: int) -> Workload:
    """The order of the draws is the original's: all prompts, then all output lengths."""
    generator = random.Random(seed)
    prompts = []
    for _ in range(count):
        length = generator.randint(*NANO_VLLM_LENGTHS)
        # The remainder changes nothing but for a tiny vocabulary, and there the lengths stay the same.
        tokens = (generator.randint(0, NANO_VLLM_LAST_TOKEN) % vocab_size for _ in range(length))
        prompts.append(tuple(tokens))
    items = tuple(WorkItem(prompt, generator.randint(*NANO_VLLM_LENGTHS)) for prompt in prompts)
    return Workload("nano-vllm", items, temperature=0.6)


def sharegpt_like(count: int, vocab_size: int, seed: int) -> Workload:
    generator = random.Random(seed)
    items = []
    for _ in range(count):
        prompt_len = log_normal_len(generator, *LOG_NORMAL_PROMPT)
        output_len = log_normal_len(generator, *LOG_NORMAL_OUTPUT)
        items.append(WorkItem(_tokens(generator, vocab_size, prompt_len), output_len))
    return Workload("sharegpt-like", tuple(items), temperature=0.6)


def shared_prefix(count: int, vocab_size: int, seed: int, input_len: int = 1024) -> Workload:
    generator = random.Random(seed)
    prefix = _tokens(generator, vocab_size, int(SHARED_SHARE * input_len))
    items = tuple(
        WorkItem(prefix + _tokens(generator, vocab_size, input_len - len(prefix)), 64) for _ in range(count)
    )
    return Workload("shared-prefix", items, temperature=0.0, shares_prefix=True)


def fixed(count: int, input_len: int, output_len: int, vocab_size: int, seed: int) -> Workload:
    generator = random.Random(seed)
    items = tuple(WorkItem(_tokens(generator, vocab_size, input_len), output_len) for _ in range(count))
    return Workload(f"{count}x{input_len}+{output_len}", items, temperature=0.0)


NAMED: dict[str, tuple[int, Callable[[int, int, int], Workload]]] = {
    "nano-vllm": (256, nano_vllm),
    "sharegpt-like": (256, sharegpt_like),
    "shared-prefix": (64, shared_prefix),
}
"""Name -> its number of prompts, and what makes it of a number, a vocabulary size and a seed."""


def log_normal_len(generator: random.Random, median: float, sigma: float) -> int:
    """A length whose logarithm is normal, clipped to LOG_NORMAL_LIMITS."""
    low, high = LOG_NORMAL_LIMITS
    return min(max(round(generator.lognormvariate(math.log(median), sigma)), low), high)


def arrive(items: Sequence[WorkItem], rate: float, seed: int = 0) -> tuple[WorkItem, ...]:
    """The same requests as a Poisson process of `rate` requests per second; infinity: all at once."""
    generator = random.Random(f"arrivals {seed}")
    now = 0.0
    arriving = []
    for item in items:
        if rate != math.inf:
            now += generator.expovariate(rate)
        arriving.append(replace(item, arrival=now))
    return tuple(arriving)


def _tokens(generator: random.Random, vocab_size: int, length: int) -> tuple[int, ...]:
    return tuple(generator.choices(range(vocab_size), k=length))
