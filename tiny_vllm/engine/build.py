"""From a configuration to a running engine: open the checkpoint, fill the options, load, allocate once."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from tiny_vllm.config import (
    DTYPE_BYTES,
    GIB,
    Choice,
    EngineConfig,
    ModelFacts,
    batch_limits,
    check_context,
    choose_device,
    choose_dtype,
    choose_fused_cpu_decode,
    choose_kv_cache_dtype,
    choose_weight_tape,
    is_pool_open,
    page_bytes,
    resolve,
    wanted_pool_bytes,
)
from tiny_vllm.engine.available_memory import AvailableMemory, available_memory, is_out_of_memory
from tiny_vllm.engine.batch import BatchShape, build_batch, pack_batch
from tiny_vllm.engine.decode_graphs import DecodeGraphs
from tiny_vllm.engine.decode_stepper import DecodeStepper
from tiny_vllm.engine.engine import Engine
from tiny_vllm.engine.forward_graphs import MAX_ROWS, ForwardGraphs, GraphRecorder
from tiny_vllm.engine.memory_needs import MemoryNeeds, step_bytes, table_bytes
from tiny_vllm.engine.plan import Chunk, StepPlan
from tiny_vllm.engine.runner import Runner
from tiny_vllm.engine.sampler import Sampler
from tiny_vllm.engine.slot_table import SlotTable
from tiny_vllm.engine.transfers import transfers_to
from tiny_vllm.errors import ConfigError, written_out
from tiny_vllm.kernels.cpu_decode import has_numba
from tiny_vllm.kernels.cuda.driver import CudaFunction
from tiny_vllm.kernels.cuda.errors import CudaKernelError
from tiny_vllm.kernels.linear import can_pack
from tiny_vllm.kernels.slot_inputs import SlotState
from tiny_vllm.kernels.triton_support import runs_triton
from tiny_vllm.models.decode_chain import DecodeChain
from tiny_vllm.models.decoder import Decoder
from tiny_vllm.models.kv_cache import KVCache, fp8_obstacle
from tiny_vllm.models.spec import ModelSpec
from tiny_vllm.models.tape_decode import TapeDecode, compile_tape, tape_bytes, tape_obstacle
from tiny_vllm.models.weights import ModelWeights
from tiny_vllm.weights.checkpoint import Checkpoint, open_checkpoint
from tiny_vllm.weights.load import load_weights

logger = logging.getLogger(__name__)

CPU_SPARE_SHARE = 0.1
"""Of the available memory: for libraries that come later (numba takes 0.13 GiB), for other processes, the API
process of a server first, and for whatever else no plan knows. As gpu_memory_utilization leaves on a GPU."""


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """What would be built, before any weight is read.

    config: complete. choices: what was decided for the user and why. needs: the memory it will take, of what
    there is available; None: unknown.
    """

    checkpoint: Checkpoint
    config: EngineConfig
    choices: tuple[Choice, ...]
    needs: MemoryNeeds
    available: AvailableMemory | None


def plan_engine(config: EngineConfig) -> EnginePlan:
    """Open and check the checkpoint and fill every "auto". Reads no tensor data, allocates nothing.

    Raises ModelError or ConfigError.
    """
    # No checkpoint is fetched for a GPU that is not there.
    choose_device(config.device, torch.cuda.is_available())
    return plan_checkpoint(
        config, open_checkpoint(config.model, load_format=config.load_format, tokenizer=config.tokenizer)
    )


def plan_checkpoint(config: EngineConfig, checkpoint: Checkpoint) -> EnginePlan:
    """As `plan_engine`, for a checkpoint that has been opened."""
    device = choose_device(config.device, torch.cuda.is_available())
    dtype = choose_dtype(config.dtype, checkpoint.spec.dtype)
    is_open = config.dtype == "auto" and device.value == "cpu" and dtype.value != "float32"
    if not is_open or _has_bf16_instructions():
        return _plan_in(dtype, config, device, checkpoint)
    lack = "this CPU has no BF16 instructions"
    obstacle = "how much memory is available is unknown"
    if available_memory() is not None:
        wide = Choice("dtype", "float32", f"prompts are faster: {lack}")
        try:
            return _plan_in(wide, config, device, checkpoint, must_hold_a_sequence=True)
        except ConfigError as error:
            obstacle = f"in FP32 {error.message}"
    dtype = replace(dtype, reason=f"{dtype.reason}, although {lack}: {obstacle}")
    return _plan_in(dtype, config, device, checkpoint)


def _plan_in(
    chosen_dtype: Choice,
    config: EngineConfig,
    device: Choice,
    checkpoint: Checkpoint,
    *,
    must_hold_a_sequence: bool = False,
) -> EnginePlan:
    """The plan in a type. Raises ConfigError where it does not fit this machine.

    A pool whose size is left to us takes what all else leaves, be it a single page. What only makes things
    faster comes after it, however: on a CPU a second copy of the weights must leave it one sequence of
    max_model_len, and with must_hold_a_sequence so must the type.
    """
    spec, dtype, place = checkpoint.spec, str(chosen_dtype.value), torch.device(str(device.value))
    gpu_bytes = torch.cuda.mem_get_info()[1] if place.type == "cuda" else None
    main_memory = available_memory()
    facts = ModelFacts(
        spec.max_position_embeddings,
        spec.default_model_len,
        spec.kv_values_per_token,
        spec.head_dim,
    )
    weight_bytes = spec.num_parameters * DTYPE_BYTES[dtype]
    _check_weights(config, dtype, weight_bytes, gpu_bytes, main_memory)
    check_context(config, facts)
    slots, _ = batch_limits(config, gpu_bytes)
    max_model_len = config.max_model_len or facts.default_model_len
    tables = table_bytes(spec, max_model_len=max_model_len, page_size=config.page_size, num_slots=slots)
    if main_memory is not None:
        _check_tables(
            max_model_len, tables, main_memory.num_bytes - (weight_bytes if gpu_bytes is None else 0)
        )
    kv_cache = choose_kv_cache_dtype(config.kv_cache_dtype, dtype, fp8_obstacle(place))
    config = replace(config, kv_cache_dtype=kv_cache.value)  # type: ignore[arg-type]
    needs = _needs_beside_pages(config, spec, dtype, tables, gpu_bytes)
    is_open = is_pool_open(config)
    available = main_memory
    if gpu_bytes is not None:
        available = _available_gpu_memory(config)
    elif available is not None and is_open:
        needs = replace(needs, spare=int(available.num_bytes * CPU_SPARE_SHARE))
    left = None if available is None else available.num_bytes - needs.beside_pages
    per_page = page_bytes(config, dtype, facts)
    wanted = wanted_pool_bytes(config, facts, per_page, slots)

    obstacle = tape_obstacle(
        spec, config.page_size, getattr(torch, dtype), place, kv_cache_dtype=config.kv_cache_dtype
    )
    tape = choose_weight_tape(
        config.weight_tape,
        obstacle=obstacle,
        tape_bytes=0 if obstacle else tape_bytes(spec, config.page_size),
        free_bytes=max(left or 0, 0),
        asked_page_bytes=0 if is_open else wanted,
    )
    fused_bytes = (spec.num_layer_parameters + spec.vocab_size * spec.hidden_size) * DTYPE_BYTES[dtype]
    fused = choose_fused_cpu_decode(
        config.fused_cpu_decode,
        device=place.type,
        dtype=dtype,
        fits_family=spec.fits_fused_cpu_decode,
        has_numba=has_numba(),
        kv_cache_dtype=config.kv_cache_dtype,
        copied_bytes=fused_bytes,
        available_bytes=0 if available is None else available.num_bytes,
        left_bytes=0 if left is None else left - wanted,
    )
    second = fused_bytes if fused.value else tape_bytes(spec, config.page_size) if tape.value else 0
    needs = replace(needs, copies=needs.copies + second)
    left = None if left is None else left - second
    hints = [f"set {choice.name}=False" for choice in (tape, fused) if choice.value]
    if left is not None and left < (per_page if is_open else 0):
        raise _no_memory_for_pages(dtype, needs, available, hints, is_on_gpu=gpu_bytes is not None)
    resolved, choices = resolve(
        config, facts, device=device, dtype=chosen_dtype, free_bytes=left, gpu_bytes=gpu_bytes
    )
    assert resolved.num_pages is not None
    needs = replace(needs, pages=resolved.num_pages * per_page)
    if must_hold_a_sequence and is_open and needs.pages < wanted:
        raise ConfigError(
            f"there is room for pages of {resolved.num_pages * resolved.page_size} tokens, less than one "
            f"sequence of max_model_len ({resolved.max_model_len})",
            hint="lower max_model_len, or raise what sizes the pool: num_pages, mean_sequence_len, "
            "kv_cache_memory_bytes",
        )
    if left is not None and needs.pages > left:
        raise ConfigError(
            f"the page pool needs {needs.pages / GIB:.2f} GiB ({resolved.num_pages} pages), but "
            f"{replace(needs, pages=0).shares(available)}",
            hint=", or ".join(["lower num_pages, kv_cache_memory_bytes or mean_sequence_len", *hints]),
        )
    resolved = replace(resolved, fused_cpu_decode=bool(fused.value), weight_tape=bool(tape.value))
    return EnginePlan(checkpoint, resolved, (*choices, kv_cache, tape, fused), needs, available)


def _needs_beside_pages(
    config: EngineConfig, spec: ModelSpec, dtype: str, tables: int, gpu_bytes: int | None
) -> MemoryNeeds:
    """Without second copies that are a matter of choice. gpu_bytes: of the GPU in all; None: a CPU."""
    value_bytes = DTYPE_BYTES[dtype]
    slots, tokens = batch_limits(config, gpu_bytes)
    if gpu_bytes is not None and not config.enforce_eager:
        # The graphs of small steps have memory of their own, which they share.
        tokens += MAX_ROWS
    # The layers' matrices are packed one after the other, but the embedding stays beside the LM head's.
    is_packed = gpu_bytes is None and can_pack(getattr(torch, dtype), torch.device("cpu"))
    return MemoryNeeds(
        weights=spec.num_parameters * value_bytes,
        copies=spec.vocab_size * spec.hidden_size * value_bytes if is_packed else 0,
        step=step_bytes(spec, value_bytes, num_tokens=tokens, num_slots=slots),
        tables=tables if gpu_bytes is None else 0,
        spare=0,
        pages=0,
    )


def _check_weights(
    config: EngineConfig, dtype: str, weight_bytes: int, gpu_bytes: int | None, main: AvailableMemory | None
) -> None:
    """Refuse weights that alone need more memory than there is: no option of the page pool helps."""
    hints = ["use a smaller model"]
    if dtype == "float32":
        hints.append("dtype='bfloat16' (half as much)")
    available = main
    if gpu_bytes is not None:
        share = f"gpu_memory_utilization is {config.gpu_memory_utilization}"
        available = AvailableMemory(int(gpu_bytes * config.gpu_memory_utilization), share)
        if weight_bytes < gpu_bytes:
            hints.append("raise gpu_memory_utilization")
    if available is not None and weight_bytes > available.num_bytes:
        raise ConfigError(
            f"the weights need {weight_bytes / GIB:.2f} GiB in {dtype}, but {available.size} of memory are "
            f"available{available.reason}",
            hint=", or ".join(hints),
        )


def _check_tables(max_model_len: int, tables: int, left: int) -> None:
    """Refuse a context whose tables, made on the host, need more main memory than is left there."""
    if tables > left:
        raise ConfigError(
            f"max_model_len is {max_model_len}, whose rotary angles and page numbers take "
            f"{tables / GIB:.2f} GiB, but {max(left, 0) / GIB:.2f} GiB are available",
            hint="lower max_model_len",
        )


def _no_memory_for_pages(
    dtype: str, needs: MemoryNeeds, available: AvailableMemory | None, hints: list[str], *, is_on_gpu: bool
) -> ConfigError:
    first = "lower max_num_batched_tokens, max_num_seqs or max_model_len"
    if is_on_gpu:
        first = "raise gpu_memory_utilization, lower max_num_batched_tokens or max_num_seqs"
    if dtype == "float32":
        hints = [*hints, "use dtype='bfloat16'"]
    return ConfigError(
        f"no memory is left for the KV cache: {needs.shares(available)}",
        hint=", ".join([first, *hints, "or free memory"]),
    )


def build_engine(plan: EnginePlan, *, progress: Callable[[int, int], None] | None = None) -> Engine:
    """Load the weights and allocate the page pool. progress: (values loaded, values in all).

    Raises ConfigError if memory runs out: others may take what was available, and limits may count what no
    plan knows, such as libraries and the stacks of threads.
    """
    try:
        return _build(plan, progress)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        options = [name for name in ("weight_tape", "fused_cpu_decode") if getattr(plan.config, name)]
        hints = ["lower num_pages, max_model_len or max_num_batched_tokens"]
        hints += [f"set {name}=False" for name in options]
        raise ConfigError(
            f"memory ran out while the engine was built: {plan.needs.shares(plan.available)} ({error})",
            hint=", ".join([*hints, "or free memory"]),
        ) from error


def _build(plan: EnginePlan, progress: Callable[[int, int], None] | None) -> Engine:
    config, checkpoint = plan.config, plan.checkpoint
    for choice in plan.choices:
        logger.info("%s = %s (%s)", choice.name, choice.value, choice.reason)
    if checkpoint.eos_remark is not None and not checkpoint.can_end:
        logger.warning("%s: %s", written_out(checkpoint.name), checkpoint.eos_remark)
    assert config.num_pages and config.max_num_seqs and config.max_model_len
    device = torch.device(config.device)
    dtype = getattr(torch, config.dtype)
    spec = checkpoint.spec
    compiling = None
    if config.weight_tape:
        # Beside all that follows: three to four seconds where nothing is cached.
        worker = ThreadPoolExecutor(1)
        compiling = worker.submit(compile_tape, spec, config.page_size, config.max_num_seqs, device)
        worker.shutdown(wait=False)
    weights = load_weights(checkpoint, dtype=dtype, device=device, seed=config.seed, progress=progress)
    kv_cache = KVCache.allocate(
        spec,
        num_pages=config.num_pages + 1,  # the null page comes on top
        page_size=config.page_size,
        dtype=dtype,
        is_fp8=config.kv_cache_dtype == "fp8",
        device=device,
    )
    table = SlotTable(config.max_num_seqs, -(-config.max_model_len // config.page_size), device)
    sampler = Sampler(config.max_num_seqs, spec.vocab_size, device)
    # The decoder takes the weights apart; on a GPU its decode steps go on using the same tensors.
    has_chain = runs_triton(kv_cache.k) and device.type == "cuda"
    kept = replace(weights, layers=list(weights.layers)) if has_chain or config.weight_tape else None
    decoder = Decoder(
        spec, weights, max_model_len=config.max_model_len, fused_cpu_decode=bool(config.fused_cpu_decode)
    )
    steppers: list[DecodeStepper] = []
    graphs = None
    if has_chain and not config.enforce_eager:
        graphs = ForwardGraphs(decoder, kv_cache, table, GraphRecorder(device))
    if kept is not None:
        state = SlotState(
            table.page_table, table.computed_len, table.last_token, sampler.stream, sampler.position
        )
        if has_chain:
            _load_prompt_kernels(decoder, kv_cache, table, config.max_model_len, device)
        if compiling is not None:
            steppers += _make_tape(spec, kept, decoder.cos_sin, kv_cache, state, sampler, compiling)
        if has_chain:
            chain = DecodeChain(spec, kept, decoder.cos_sin, kv_cache)
            steppers.append(DecodeGraphs(chain, state, sampler.temperature, capture=not config.enforce_eager))
    runner = Runner(
        decoder,
        kv_cache,
        sampler,
        table,
        transfers_to(device),
        page_size=config.page_size,
        steppers=steppers,
        graphs=graphs,
    )
    return Engine(
        config, runner, eos_token_ids=checkpoint.eos_token_ids, window=checkpoint.spec.longest_window
    )


@torch.inference_mode()
def _load_prompt_kernels(
    decoder: Decoder, kv_cache: KVCache, table: SlotTable, max_model_len: int, device: torch.device
) -> None:
    """Compile or load what prompts run through: a prompt of two pages if that is allowed, all of it on the
    null page. The last layer attends for its end alone, as most prompts have it."""
    token_ids = (0,) * min(2 * kv_cache.page_size, max_model_len)
    chunk = Chunk(table.padding_slot, 0, 0, token_ids, samples=True)
    plan = StepPlan(0, (), (), (), (), (), (chunk,))
    num_pages = -(-len(token_ids) // kv_cache.page_size)
    shape = BatchShape(0, len(token_ids), 1, 0, num_pages, ends_only=True)
    packed = torch.from_numpy(pack_batch(plan, shape, table.padding_slot)).to(device)
    batch = build_batch(packed, shape, table, kv_cache.page_size)
    decoder.logits(decoder.forward(batch, kv_cache))


def _make_tape(
    spec: ModelSpec,
    weights: ModelWeights,
    cos_sin: torch.Tensor,
    kv_cache: KVCache,
    state: SlotState,
    sampler: Sampler,
    compiling: Future[dict[int, CudaFunction]],
) -> list[DecodeStepper]:
    """The weight tape, or nothing where its kernel does not compile or its memory is not to be had."""
    try:
        functions = compiling.result()
        return [TapeDecode(spec, weights, cos_sin, kv_cache, state, sampler.temperature, functions)]
    except (CudaKernelError, torch.cuda.OutOfMemoryError) as error:
        warnings.warn(
            f"the weight tape cannot run here, slower kernels take its place: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return []


def _has_bf16_instructions() -> bool:
    """Whether torch has more for BF16 on this CPU than conversions to FP32 and back."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _available_gpu_memory(config: EngineConfig) -> AvailableMemory:
    """The share of the GPU's memory that we may use, less what is taken."""
    # What an engine of this process that was closed has left in torch's cache is free, too.
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    share = f"gpu_memory_utilization is {config.gpu_memory_utilization} of {total / GIB:.2f} GiB"
    taken = f"{(total - free) / GIB:.2f} GiB are taken"
    return AvailableMemory(
        max(int(total * config.gpu_memory_utilization) - (total - free), 0), f"{share}, {taken}"
    )
