"""Engine options: one flat frozen dataclass, and the one place where "auto" becomes a value.

Names are vLLM's where vLLM has the option. The command line is generated from these fields.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from tiny_vllm.errors import ConfigError, shown
from tiny_vllm.types import Pooling

Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "bfloat16", "float16", "float32"]
KVCacheDType = Literal["auto", "fp8", "fp8_e4m3"]
LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
GenerationConfig = Literal["auto", "none"]
PrefillPolicy = Literal["auto", "exclusive", "mixed"]
PoolSizing = Literal["memory", "formula"]

DEFAULT_CPU_KV_BYTES = 1 << 30
MAX_NUMBER = 2**50
"""No option has a use for more; arithmetic on it stays within 64 bits and finite."""
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
GIB = float(1 << 30)
# From here on a step of 16,384 tokens costs a small part of the memory.
LARGE_GPU_BYTES = 64 << 30


def _option(default: Any, help_text: str, *, low: float | None = None, high: float | None = None) -> Any:
    return field(default=default, metadata={"help": help_text, "low": low, "high": high})


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Every option of the engine. `None` and "auto" are filled by `resolve`."""

    model: str | None = _option(
        None, "directory, .gguf file or hub id; without it the bundled SmolLM2-135M-Instruct"
    )
    tokenizer: str | None = _option(None, "directory, tokenizer.json or .gguf file, if not the model's own")
    load_format: LoadFormat = _option("auto", "how to read the weights; dummy: seeded random weights")
    generation_config: GenerationConfig = _option(
        "auto",
        "sampling parameters that requests leave out; auto: as the model's generation_config.json says, "
        "none: OpenAI's defaults",
    )
    dtype: DType = _option(
        "auto",
        "type of weights, activations and KV cache; auto: the checkpoint's, or float32 where it fits on a "
        "CPU without BF16 instructions",
    )
    kv_cache_dtype: KVCacheDType = _option(
        "auto", "auto: as dtype; fp8 (e4m3) halves the KV cache at some loss of accuracy"
    )
    device: Device = _option("auto", "where to run; auto takes a GPU when there is one")
    seed: int = _option(0, "seed of dummy weights and of requests without a seed of their own", low=0)
    max_model_len: int | None = _option(None, "longest prompt plus output, in tokens", low=2)
    max_num_seqs: int | None = _option(
        None,
        "slots: sequences that run at the same time (GPU: 256, a server 160; CPU: 16)",
        low=1,
        high=65536,
    )
    max_num_batched_tokens: int | None = _option(
        None,
        "most tokens one step computes (GPU: 8192, a large one 16384, but not a server; CPU: 256)",
        low=1,
    )
    gpu_memory_utilization: float = _option(
        0.9, "share of the GPU's memory that weights, activations and pages may take", low=0.01, high=1.0
    )
    kv_cache_memory_bytes: int | None = _option(
        None,
        "bytes for the page pool, instead of gpu_memory_utilization "
        "(CPU default: 1 GiB, less where memory is short)",
        low=1,
    )
    page_size: int = _option(16, "tokens per page, a power of two; 16 to 32 recommended", low=1, high=1024)
    pool_sizing: PoolSizing = _option(
        "memory", "memory: as many pages as fit; formula: max_num_seqs x mean_sequence_len x 1.5"
    )
    mean_sequence_len: int | None = _option(
        None, "mean prompt plus output, for pool_sizing=formula (tokens)", low=1
    )
    num_pages: int | None = _option(None, "pages in the pool, overriding both ways of sizing it", low=1)
    enable_prefix_caching: bool = _option(True, "share pages between requests with a common prefix")
    prefill_policy: PrefillPolicy = _option(
        "auto", "exclusive: prompts alone in a step; mixed: prompt chunks beside running decodes"
    )
    max_prefill_tokens_per_decode: int | None = _option(
        None,
        "most prompt tokens computed between two tokens of a running request: bounds its wait; none: any "
        "number; a server takes 4096 unless told otherwise",
        low=1,
    )
    ageing_seconds: float = _option(
        10.0, "waiting this long is worth one level of priority, so that nothing starves", low=0.001
    )
    max_queue_len: int | None = _option(None, "most waiting sequences before new requests are refused", low=1)
    max_logprobs: int = _option(20, "most logprobs per token a request may ask for; -1: no limit", low=-1)
    max_n: int = _option(128, "most choices a request may ask for", low=1)
    async_scheduling: bool | None = _option(
        None, "plan the next step while one runs, and read tokens a step later; default: on a GPU"
    )
    enforce_eager: bool = _option(False, "do not capture CUDA graphs")
    weight_tape: bool | None = _option(
        None, "compute decodes of few sequences on a Hopper GPU in one kernel, holding the weights twice"
    )
    fused_cpu_decode: bool | None = _option(
        None, "compute decodes on a CPU in one compiled function, holding the weights twice"
    )

    def __post_init__(self) -> None:
        for option in fields(self):
            check_option(option.name, getattr(self, option.name), option.type, option.metadata)
        if self.page_size & (self.page_size - 1):
            raise ConfigError(f"page_size is {self.page_size}, but must be a power of two", hint="use 16")
        if self.pool_sizing == "formula" and self.mean_sequence_len is None:
            raise ConfigError(
                "pool_sizing='formula' needs mean_sequence_len",
                hint="set it to the mean number of prompt plus output tokens you expect",
            )
        if self.pool_sizing != "formula" and self.mean_sequence_len is not None:
            raise ConfigError(
                f"mean_sequence_len is {self.mean_sequence_len}, but only pool_sizing='formula' uses it",
                hint="add pool_sizing='formula' or leave it out",
            )
        if self.kv_cache_memory_bytes is not None and (self.num_pages or self.pool_sizing == "formula"):
            raise ConfigError(
                f"kv_cache_memory_bytes is {self.kv_cache_memory_bytes}, but num_pages or "
                "pool_sizing='formula' already sizes the pool",
                hint="give one of them",
            )

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineConfig:
        """Build a config from keywords; an unknown one is an error, never ignored."""
        known = [option.name for option in fields(cls)]
        for name in options:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]}?" if close else "known options: " + ", ".join(known)
                raise ConfigError(f"unknown engine option {shown(name)}", hint=hint)
        return cls(**options)


def check_option(name: str, value: Any, annotation: Any, metadata: Mapping[str, Any]) -> None:
    """Check a value against its field's annotation and its "low" and "high". Raises ConfigError, with the
    "help" of the field as its hint.
    """
    kind = OPTION_KINDS[str(annotation)]
    if value is None and kind.optional:
        return
    if kind.choices:
        if value not in kind.choices:
            raise ConfigError(
                f"{name} is {shown(value)}, but must be one of {', '.join(kind.choices)}",
                hint=metadata["help"],
            )
        return
    accepted = (int, float) if kind.type is float else kind.type
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind.type is not bool):
        raise ConfigError(
            f"{name} is {shown(value)}, but must be of type {kind.type.__name__}", hint=metadata["help"]
        )
    if isinstance(value, int | float) and kind.type is not bool:
        _check_range(name, value, metadata)


def _check_range(name: str, value: float, metadata: Mapping[str, Any]) -> None:
    low, high = metadata["low"], MAX_NUMBER if metadata["high"] is None else metadata["high"]
    # The comparison is written so that NaN fails it.
    if (low is None or value >= low) and value <= high:
        return
    shown = "an integer of more than 256 bits" if _is_huge(value) else value
    limit = f"from {low} to {high}" if high != MAX_NUMBER or value > high else f"at least {low}"
    raise ConfigError(f"{name} is {shown}, but must be {limit}", hint=metadata["help"])


def _is_huge(value: float) -> bool:
    """Whether Python may refuse to print it."""
    return isinstance(value, int) and value.bit_length() > 256


@dataclass(frozen=True)
class OptionKind:
    """How one annotation of EngineConfig is read: its scalar type, choices, and whether None is allowed."""

    type: type
    optional: bool = False
    choices: tuple[str, ...] = ()


OPTION_KINDS: Mapping[str, OptionKind] = {
    "str": OptionKind(str),
    "str | None": OptionKind(str, optional=True),
    "int": OptionKind(int),
    "int | None": OptionKind(int, optional=True),
    "float": OptionKind(float),
    "float | None": OptionKind(float, optional=True),
    "bool": OptionKind(bool),
    "bool | None": OptionKind(bool, optional=True),
    "Device": OptionKind(str, choices=get_args(Device)),
    "DType": OptionKind(str, choices=get_args(DType)),
    "KVCacheDType": OptionKind(str, choices=get_args(KVCacheDType)),
    "LoadFormat": OptionKind(str, choices=get_args(LoadFormat)),
    "GenerationConfig": OptionKind(str, choices=get_args(GenerationConfig)),
    "PrefillPolicy": OptionKind(str, choices=get_args(PrefillPolicy)),
    "PoolSizing": OptionKind(str, choices=get_args(PoolSizing)),
    "Pooling": OptionKind(str, choices=get_args(Pooling)),
}


@dataclass(frozen=True)
class Choice:
    """One option that `resolve` decided, and why."""

    name: str
    value: object
    reason: str


@dataclass(frozen=True)
class ModelFacts:
    """What `resolve` must know of the model.

    max_position_embeddings: longest context. default_model_len: context if the user asks for none; shorter
    where a longer one changes the answers to short prompts. kv_values_per_token: K and V over all layers, in
    heads of head_dim.
    """

    max_position_embeddings: int
    default_model_len: int
    kv_values_per_token: int
    head_dim: int


def choose_device(device: Device, cuda_available: bool) -> Choice:
    """Where to run. Raises ConfigError when a GPU is demanded and there is none."""
    if device == "cuda" and not cuda_available:
        raise ConfigError("device is 'cuda', but torch sees no GPU", hint="use device='cpu' or device='auto'")
    if device != "auto":
        return Choice("device", device, "as asked")
    if cuda_available:
        return Choice("device", "cuda", "a GPU is there")
    return Choice("device", "cpu", "no GPU is visible")


def choose_dtype(dtype: DType, checkpoint_dtype: str) -> Choice:
    """The checkpoint's own type unless asked otherwise: nothing is narrowed silently."""
    if dtype != "auto":
        return Choice("dtype", dtype, "as asked")
    return Choice("dtype", checkpoint_dtype, "the checkpoint's own type")


def choose_kv_cache_dtype(asked: KVCacheDType, dtype: str, obstacle: str | None) -> Choice:
    """obstacle: why FP8 cannot be read here. Raises ConfigError when it is demanded and cannot be had."""
    if asked == "auto":
        return Choice("kv_cache_dtype", asked, f"{dtype}, as activations")
    if obstacle is not None:
        raise ConfigError(f"kv_cache_dtype is {asked!r}, but {obstacle}", hint="use kv_cache_dtype='auto'")
    return Choice("kv_cache_dtype", "fp8", "as asked: e4m3, with a scale per token and KV head")


def choose_weight_tape(
    asked: bool | None, *, obstacle: str | None, tape_bytes: int, free_bytes: int, asked_page_bytes: int = 0
) -> Choice:
    """Whether to keep the weights twice on a GPU for the weight-tape kernel.

    obstacle: why the kernel cannot run here. tape_bytes: the second copy. free_bytes: left for it and the
    pages, of which asked_page_bytes are spoken for. Raises ConfigError when it is demanded and cannot be had.
    """
    name = "weight_tape"
    if asked is False:
        return Choice(name, False, "as asked")
    if obstacle is not None:
        if asked:
            raise ConfigError(
                f"weight_tape is True, but {obstacle}", hint="leave it out, or remove the obstacle"
            )
        return Choice(name, False, obstacle)
    sizes = f"{tape_bytes / GIB:.2f} GiB of weights held twice"
    if asked:
        return Choice(name, True, f"as asked: {sizes}")
    fits = tape_bytes <= free_bytes // 4
    limit = f"a quarter of the {free_bytes / GIB:.2f} GiB left for pages"
    if fits and tape_bytes > free_bytes - asked_page_bytes:
        fits, limit = (
            False,
            f"the {(free_bytes - asked_page_bytes) / GIB:.2f} GiB that the pages asked for leave",
        )
    return Choice(name, fits, f"{sizes}, {'within' if fits else 'more than'} {limit}")


def choose_fused_cpu_decode(
    asked: bool | None,
    *,
    device: str,
    dtype: str,
    fits_family: bool,
    has_numba: bool,
    kv_cache_dtype: str = "auto",
    copied_bytes: int,
    available_bytes: int,
    left_bytes: int,
) -> Choice:
    """Whether to keep most weights twice for the fused decode step.

    fits_family: whether the step computes this family of models. copied_bytes: the second copy.
    available_bytes: of main memory. left_bytes: of that beside the weights, a step and the pages wanted.
    Raises ConfigError when it is demanded and cannot be had.
    """
    name = "fused_cpu_decode"
    if asked is False:
        return Choice(name, False, "as asked")
    obstacle: str | None = None
    hint: str | None = None
    if device != "cpu":
        obstacle, hint = f"the device is {device}", "use device='cpu'"
    elif dtype not in ("bfloat16", "float32"):
        obstacle, hint = f"the dtype is {dtype}", "use dtype='bfloat16' or dtype='float32'"
    elif not fits_family:
        obstacle, hint = "the fused step does not compute this family of models", "leave it out"
    elif kv_cache_dtype != "auto":
        obstacle, hint = f"it does not read a KV cache in {kv_cache_dtype}", "use kv_cache_dtype='auto'"
    elif not has_numba:
        obstacle, hint = "numba is not installed", "pip install 'tiny-vllm[cpu]'"
    if obstacle is not None:
        if asked:
            raise ConfigError(f"fused_cpu_decode is True, but {obstacle}", hint=hint)
        return Choice(name, False, obstacle)
    if asked:
        return Choice(name, True, "as asked")
    fits = copied_bytes <= available_bytes // 4
    sizes = f"{copied_bytes / GIB:.2f} GiB of weights held twice"
    limit = f"a quarter of the {available_bytes / GIB:.2f} GiB available"
    if fits and copied_bytes > left_bytes:
        fits, limit = False, f"the {max(left_bytes, 0) / GIB:.2f} GiB that weights, steps and pages leave"
    return Choice(name, fits, f"{sizes}, {'within' if fits else 'more than'} {limit}")


def resolve(
    config: EngineConfig,
    facts: ModelFacts,
    *,
    device: Choice,
    dtype: Choice,
    free_bytes: int | None,
    gpu_bytes: int | None,
) -> tuple[EngineConfig, tuple[Choice, ...]]:
    """Fill every "auto" once.

    device, dtype: chosen before. free_bytes: memory left for pages beside all else; None: enough for the
    pool that a CPU has by default. gpu_bytes: of the GPU in all; None on a CPU. Returns the complete config
    and the choices made, for the log. Raises ConfigError when the pool could not hold a single page.
    """
    on_gpu = device.value == "cuda"
    choices = [device, dtype]
    values: dict[str, Any] = {choice.name: choice.value for choice in choices}

    def choose(name: str, value: object, reason: str) -> None:
        given = getattr(config, name)
        if given is None or given == "auto":
            choices.append(Choice(name, value, reason))
            values[name] = value
        else:
            values[name] = given

    _choose_batch_limits(config, choose, gpu_bytes if on_gpu else None)
    # LOG.md has what benchmarks/arrivals.py and its predecessor found.
    if on_gpu:
        choose("prefill_policy", "exclusive", "measured: the same throughput, earlier first tokens")
    else:
        reason = "measured: the same throughput, shorter longest gaps between tokens"
        choose("prefill_policy", "mixed", reason)
    async_reason = "hides the host's work behind the GPU's" if on_gpu else "a CPU computes on the host"
    choose("async_scheduling", on_gpu, async_reason)
    choose("max_model_len", facts.default_model_len, "the model's context")
    if config.num_pages is None:
        choose("num_pages", *_size_pool(config, facts, values, free_bytes))
    # It has become num_pages: together they would contradict each other.
    values["kv_cache_memory_bytes"] = None
    if not on_gpu:
        for name in ("gpu_memory_utilization", "enforce_eager"):
            choices.append(Choice(name, getattr(config, name), "has no effect on a CPU"))
    return replace(config, **values), tuple(choices)


def check_context(config: EngineConfig, facts: ModelFacts) -> None:
    """Raises ConfigError if sequences may become longer than the model can follow."""
    if config.max_model_len is not None and config.max_model_len > facts.max_position_embeddings:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, more than the model's context "
            f"({facts.max_position_embeddings} tokens)",
            hint="lower max_model_len",
        )


def batch_limits(config: EngineConfig, gpu_bytes: int | None) -> tuple[int, int]:
    """The slots and tokens of a step that `resolve` chooses at most, before it has."""
    default_seqs, default_tokens, _ = default_batch_limits(config, gpu_bytes)
    slots = config.max_num_seqs or default_seqs
    return slots, config.max_num_batched_tokens or max(slots, default_tokens)


def default_batch_limits(config: EngineConfig, gpu_bytes: int | None) -> tuple[int, int, str]:
    """Slots, tokens of a step, and why. gpu_bytes: the GPU's memory; None: a CPU.

    The largest steps compute prompts fastest. Whoever bounds how long prompts delay running requests, as a
    server does, waits for tokens one by one: fewer slots and shorter steps bring each sooner (LOG.md has the
    figures of an H200)."""
    if gpu_bytes is None:
        return 16, 256, "default for this device"
    if config.max_prefill_tokens_per_decode is not None:
        return 160, 8192, "default for this device where max_prefill_tokens_per_decode bounds waits"
    return 256, 16384 if gpu_bytes >= LARGE_GPU_BYTES else 8192, "default for this device"


def _choose_batch_limits(
    config: EngineConfig, choose: Callable[[str, object, str], None], gpu_bytes: int | None
) -> None:
    """Slots and the token budget of a step; the budget must cover one token of every slot."""
    seqs, tokens = config.max_num_seqs, config.max_num_batched_tokens
    if seqs is not None and tokens is not None and tokens < seqs:
        raise ConfigError(
            f"max_num_batched_tokens is {tokens}, less than max_num_seqs ({seqs}), so a step could not "
            "advance every running sequence",
            hint="raise max_num_batched_tokens or lower max_num_seqs",
        )
    default_seqs, default_tokens, reason = default_batch_limits(config, gpu_bytes)
    if tokens is not None and tokens < default_seqs:
        choose("max_num_seqs", tokens, "no more than max_num_batched_tokens")
    else:
        choose("max_num_seqs", default_seqs, reason)
    if seqs is not None and seqs > default_tokens:
        choose("max_num_batched_tokens", seqs, "a token of each slot")
    else:
        choose("max_num_batched_tokens", default_tokens, reason)


def kv_bytes(num_values: int, head_dim: int, *, dtype: str, kv_cache_dtype: str) -> int:
    """Bytes of keys and values of heads of head_dim; in FP8 each head has a scale of two bytes."""
    if kv_cache_dtype == "auto":
        return num_values * DTYPE_BYTES[dtype]
    return num_values + 2 * (num_values // head_dim)


def page_bytes(config: EngineConfig, dtype: str, facts: ModelFacts) -> int:
    """Bytes of one page over all layers, K and V; dtype: the resolved one."""
    num_values = facts.kv_values_per_token * config.page_size
    return kv_bytes(num_values, facts.head_dim, dtype=dtype, kv_cache_dtype=config.kv_cache_dtype)


def is_pool_open(config: EngineConfig) -> bool:
    """Whether the size of the pool is left to the memory there is."""
    return (
        config.num_pages is None and config.kv_cache_memory_bytes is None and config.pool_sizing == "memory"
    )


def wanted_pool_bytes(config: EngineConfig, facts: ModelFacts, per_page: int, num_slots: int) -> int:
    """Of the pool that was asked for. Where memory decides: of one sequence of max_model_len, but at most
    what a CPU has by default."""
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    if config.num_pages is not None:
        return config.num_pages * per_page
    if config.pool_sizing == "formula":
        return _pages_by_formula(config, num_slots) * per_page
    pages = -(-(config.max_model_len or facts.default_model_len) // config.page_size)
    return min(pages * per_page, DEFAULT_CPU_KV_BYTES)


def _pages_by_formula(config: EngineConfig, num_slots: int) -> int:
    assert config.mean_sequence_len is not None
    return -(-int(num_slots * config.mean_sequence_len * 1.5) // config.page_size)


def _size_pool(
    config: EngineConfig, facts: ModelFacts, values: Mapping[str, Any], free_bytes: int | None
) -> tuple[int, str]:
    """How many pages to allocate where num_pages does not say, and why.

    The formula's number is taken as it is. A number of bytes, given or free, buys no more pages than all
    slots at full length could use, and on a CPU no more than DEFAULT_CPU_KV_BYTES unless it was given.
    """
    if config.pool_sizing == "formula":
        num_slots = values["max_num_seqs"]
        return _pages_by_formula(config, num_slots), f"{num_slots} slots x mean length x 1.5"
    per_page = page_bytes(config, values["dtype"], facts)
    useful = values["max_num_seqs"] * -(-values["max_model_len"] // config.page_size)
    budget = config.kv_cache_memory_bytes
    if budget is None and values["device"] == "cuda":
        assert free_bytes is not None
        budget = free_bytes
    elif budget is None:
        budget = DEFAULT_CPU_KV_BYTES if free_bytes is None else min(free_bytes, DEFAULT_CPU_KV_BYTES)
    if budget < per_page:
        raise ConfigError(
            f"no room for the KV cache: {budget:,} bytes available, one page needs {per_page:,}",
            hint="raise kv_cache_memory_bytes (on a GPU also gpu_memory_utilization) or lower page_size",
        )
    pages = min(budget // per_page, useful)
    return pages, f"{pages * per_page / GIB:.2f} GiB of {budget / GIB:.2f} GiB for pages"
