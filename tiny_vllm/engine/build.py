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
    choose_device,
    choose_dtype,
    choose_fused_cpu_decode,
    choose_kv_cache_dtype,
    choose_weight_tape,
    default_batch_limits,
    page_bytes,
    resolve,
)
from tiny_vllm.engine.batch import BatchShape, build_batch, pack_batch
from tiny_vllm.engine.decode_graphs import DecodeGraphs
from tiny_vllm.engine.decode_stepper import DecodeStepper
from tiny_vllm.engine.engine import Engine
from tiny_vllm.engine.forward_graphs import MAX_ROWS, ForwardGraphs, GraphRecorder
from tiny_vllm.engine.plan import Chunk, StepPlan
from tiny_vllm.engine.runner import PROMPT_LOGPROBS_ROWS, Runner
from tiny_vllm.engine.sampler import Sampler
from tiny_vllm.engine.slot_table import SlotTable
from tiny_vllm.engine.transfers import transfers_to
from tiny_vllm.errors import ConfigError
from tiny_vllm.kernels.cpu_decode import has_numba
from tiny_vllm.kernels.cuda.driver import CudaFunction
from tiny_vllm.kernels.cuda.errors import CudaKernelError
from tiny_vllm.kernels.slot_inputs import SlotState
from tiny_vllm.kernels.triton_support import runs_triton
from tiny_vllm.models.decode_chain import DecodeChain
from tiny_vllm.models.decoder import Decoder
from tiny_vllm.models.experts import MAX_PICKS
from tiny_vllm.models.kv_cache import KVCache, fp8_obstacle
from tiny_vllm.models.spec import ModelSpec
from tiny_vllm.models.tape_decode import TapeDecode, compile_tape, tape_bytes, tape_obstacle
from tiny_vllm.models.weights import ModelWeights
from tiny_vllm.weights.checkpoint import Checkpoint, open_checkpoint
from tiny_vllm.weights.load import load_weights

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """What would be built, before any weight is read.

    config: complete. choices: what was decided for the user and why. weight_bytes: of all parameters.
    """

    checkpoint: Checkpoint
    config: EngineConfig
    choices: tuple[Choice, ...]
    weight_bytes: int


def plan_engine(config: EngineConfig) -> EnginePlan:
    """Open and check the checkpoint and fill every "auto". Reads no tensor data, allocates nothing.

    Raises ModelError or ConfigError.
    """
    device = choose_device(config.device, torch.cuda.is_available())
    checkpoint = open_checkpoint(config.model, load_format=config.load_format, tokenizer=config.tokenizer)
    dtype = choose_dtype(config.dtype, checkpoint.spec.dtype)
    is_open = config.dtype == "auto" and device.value == "cpu" and dtype.value != "float32"
    if not is_open or _has_bf16_instructions():
        return _plan_in(dtype, config, device, checkpoint)
    lack = "this CPU has no BF16 instructions"
    obstacle = "how much memory is available is unknown"
    if _available_bytes():
        try:
            return _plan_in(
                Choice("dtype", "float32", f"prompts are faster: {lack}"), config, device, checkpoint
            )
        except ConfigError as error:
            obstacle = f"in FP32 {error.message}"
    dtype = replace(dtype, reason=f"{dtype.reason}, although {lack}: {obstacle}")
    return _plan_in(dtype, config, device, checkpoint)


def _plan_in(
    chosen_dtype: Choice, config: EngineConfig, device: Choice, checkpoint: Checkpoint
) -> EnginePlan:
    """The plan in a type. Raises ConfigError where it does not fit this machine."""
    spec, dtype = checkpoint.spec, str(chosen_dtype.value)
    weight_bytes = spec.num_parameters * DTYPE_BYTES[dtype]
    _check_weights(config, str(device.value), dtype, weight_bytes)
    free_bytes = gpu_bytes = None
    if device.value == "cuda":
        gpu_bytes = torch.cuda.mem_get_info()[1]
        free_bytes = _free_gpu_bytes(config, spec, DTYPE_BYTES[dtype], weight_bytes)
    facts = ModelFacts(
        spec.max_position_embeddings,
        spec.default_model_len,
        spec.kv_values_per_token,
        spec.head_dim,
    )
    kv_cache = choose_kv_cache_dtype(
        config.kv_cache_dtype, dtype, fp8_obstacle(torch.device(str(device.value)))
    )
    config = replace(config, kv_cache_dtype=kv_cache.value)  # type: ignore[arg-type]
    asked_pages = (config.num_pages or 0) * page_bytes(config, dtype, facts)
    obstacle = tape_obstacle(
        spec,
        config.page_size,
        getattr(torch, dtype),
        torch.device(str(device.value)),
        kv_cache_dtype=config.kv_cache_dtype,
    )
    copied_bytes = 0 if obstacle else tape_bytes(spec, config.page_size)
    tape = choose_weight_tape(
        config.weight_tape,
        obstacle=obstacle,
        tape_bytes=copied_bytes,
        free_bytes=free_bytes or 0,
        asked_page_bytes=asked_pages or config.kv_cache_memory_bytes or 0,
    )
    held = f"the weights ({weight_bytes / GIB:.2f} GiB)"
    if free_bytes is not None and tape.value:
        free_bytes = max(free_bytes - copied_bytes, 0)
        held += f", their second copy ({copied_bytes / GIB:.2f} GiB, weight_tape)"
    resolved, choices = resolve(
        config, facts, device=device, dtype=chosen_dtype, free_bytes=free_bytes, gpu_bytes=gpu_bytes
    )
    fused = choose_fused_cpu_decode(
        config.fused_cpu_decode,
        device=str(device.value),
        dtype=dtype,
        fits_family=spec.fits_fused_cpu_decode,
        has_numba=has_numba(),
        kv_cache_dtype=config.kv_cache_dtype,
        copied_bytes=(spec.num_layer_parameters + spec.vocab_size * spec.hidden_size) * DTYPE_BYTES[dtype],
        available_bytes=_available_bytes(),
    )
    resolved = replace(resolved, fused_cpu_decode=bool(fused.value), weight_tape=bool(tape.value))
    available = _available_bytes()
    limit = available - weight_bytes if free_bytes is None else free_bytes
    is_known = free_bytes is not None or available > 0
    assert resolved.num_pages is not None
    needed = resolved.num_pages * page_bytes(resolved, dtype, facts)
    if is_known and needed > limit:
        raise ConfigError(
            f"the page pool needs {needed / GIB:.2f} GiB ({resolved.num_pages} pages), but beside "
            f"{held} and a step's activations {max(limit, 0) / GIB:.2f} GiB are available",
            hint="lower num_pages, kv_cache_memory_bytes or mean_sequence_len"
            + (", or set weight_tape=False" if tape.value else ""),
        )
    held_here = weight_bytes + needed if free_bytes is None else 0
    _check_tables(resolved, spec, available - held_here if available else None)
    return EnginePlan(checkpoint, resolved, (*choices, kv_cache, tape, fused), weight_bytes)


def _check_weights(config: EngineConfig, device: str, dtype: str, weight_bytes: int) -> None:
    """Refuse weights that alone need more memory than there is: no option of the page pool helps."""
    hints = ["use a smaller model"]
    if dtype == "float32":
        hints.append("dtype='bfloat16' (half as much)")
    if device == "cuda":
        total = torch.cuda.mem_get_info()[1]
        limit = int(total * config.gpu_memory_utilization)
        share = f" (gpu_memory_utilization is {config.gpu_memory_utilization})"
        if weight_bytes < total:
            hints.append("raise gpu_memory_utilization")
    else:
        limit, share = _available_bytes(), ""
        if limit == 0:  # unknown
            return
    if weight_bytes > limit:
        raise ConfigError(
            f"the weights need {weight_bytes / GIB:.2f} GiB in {dtype}, but {limit / GIB:.2f} GiB of memory "
            f"are available{share}",
            hint=", or ".join(hints),
        )


def _check_tables(config: EngineConfig, spec: ModelSpec, host_bytes: int | None) -> None:
    """Refuse a context whose tables of angles and pages need more main memory than there is (None: unknown).

    They are made on the host. Angles are FP32, and while the last table is put together its parts, one and a
    half times its size, are held beside it; a page number takes four bytes.
    """
    assert config.max_model_len is not None and config.max_num_seqs is not None
    num_ropes = len({spec.layer_rope(index) for index in range(spec.num_layers)} | {spec.rope})
    angles = config.max_model_len * spec.rope.rotary_dim * 4 * (num_ropes + 1.5)
    pages = config.max_num_seqs * -(-config.max_model_len // config.page_size) * 4
    if host_bytes is not None and angles + pages > host_bytes:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, whose rotary angles and page numbers take "
            f"{(angles + pages) / GIB:.2f} GiB, but {max(host_bytes, 0) / GIB:.2f} GiB are available",
            hint="lower max_model_len",
        )


def build_engine(plan: EnginePlan, *, progress: Callable[[int, int], None] | None = None) -> Engine:
    """Load the weights and allocate the page pool. progress: (values loaded, values in all)."""
    config, checkpoint = plan.config, plan.checkpoint
    for choice in plan.choices:
        logger.info("%s = %s (%s)", choice.name, choice.value, choice.reason)
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
    null page."""
    token_ids = (0,) * min(2 * kv_cache.page_size, max_model_len)
    chunk = Chunk(table.padding_slot, 0, 0, token_ids, samples=True)
    plan = StepPlan(0, (), (), (), (), (), (chunk,))
    shape = BatchShape(0, len(token_ids), 1, 0, -(-len(token_ids) // kv_cache.page_size))
    packed = torch.from_numpy(pack_batch(plan, shape, table.padding_slot)).to(device)
    batch = build_batch(packed, shape, table, kv_cache.page_size)
    decoder.logits(decoder.forward(batch, kv_cache)[-1:])


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


def _available_bytes() -> int:
    """Main memory that can be had without swapping; 0 where the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            sizes = dict(line.split(":") for line in file)
        return int(sizes["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return 0


def _free_gpu_bytes(config: EngineConfig, spec: ModelSpec, value_bytes: int, weight_bytes: int) -> int:
    """GPU memory left for pages: the share we may use, less what is taken, the weights and a step's
    buffers."""
    # What an engine of this process that was closed has left in torch's cache is free, too.
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    default_seqs, default_tokens, _ = default_batch_limits(config, total)
    tokens = config.max_num_batched_tokens or default_tokens
    if not config.enforce_eager:
        # The graphs of small steps have memory of their own, which they share.
        tokens += MAX_ROWS
    rows = max(config.max_num_seqs or default_seqs, PROMPT_LOGPROBS_ROWS)
    # Widest values alive at once: a layer's inputs, outputs and MLP activations; logits in FP32, three
    # copies.
    activations = (
        tokens * (4 * spec.hidden_size + 2 * spec.qkv_size + 3 * spec.widest_intermediate_size) * value_bytes
    )
    if spec.experts is not None:
        # The outputs of picked experts, before they are summed.
        activations += min(tokens * spec.experts.num_active, MAX_PICKS) * spec.hidden_size * 4
    activations += 3 * rows * spec.vocab_size * 4
    left = int(total * config.gpu_memory_utilization) - (total - free) - weight_bytes - activations
    if left <= 0 and config.kv_cache_memory_bytes is None and config.num_pages is None:
        raise ConfigError(
            f"no GPU memory is left for the KV cache: gpu_memory_utilization is "
            f"{config.gpu_memory_utilization} of {total / GIB:.1f} GiB; others take "
            f"{(total - free) / GIB:.1f} GiB, weights {weight_bytes / GIB:.1f} GiB, activations "
            f"{activations / GIB:.1f} GiB",
            hint="raise gpu_memory_utilization, lower max_num_batched_tokens or max_num_seqs, or free memory",
        )
    return max(left, 0)
