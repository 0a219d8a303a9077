"""The weight-tape kernel: a whole decode step of a Llama-like model as one launch (sm_90 and newer).

    last tokens of 1 to 8 slots -> next tokens, written to the slot tables;  or their logits

`tape.cu` describes the kernel; it is compiled for the model's shape, once per bucket of tokens. Formulas are
those of the decode chain's kernels. BF16 weights, K/V and exchanged values, FP32 accumulation; the residual
stays in FP32. A step reads every weight once: its time is that of reading the tape and the K/V of the
contexts, plus what the exchanges between blocks cost beyond what the ring hides.

Rejected: flags beside the data, which cost a fence and one more round trip per exchange; a barrier of all
blocks, which also waits for those whose results a block does not need; weights through plain loads, whose
stream stops at every exchange; clusters of two blocks that fetch half of the tokens' vectors each for both,
which wait for one another at every exchange. Measurements: LOG.md.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tiny_vllm.kernels.cuda.driver import CudaFunction, architecture, load_function
from tiny_vllm.kernels.cuda.nvrtc import compile_cubin
from tiny_vllm.kernels.sampling_noise import GOLDEN_32, MIX_32
from tiny_vllm.kernels.slot_inputs import SlotState
from tiny_vllm.kernels.weight_tape.layout import (
    NUM_BLOCKS,
    WINDOW,
    BlockPlan,
    TapeLayout,
    defines,
    exchange_words,
    plan_block,
    splits,
)

NUM_THREADS = 576
LOG2_E = 1.4426950408889634
# A wait of this long inside the kernel ends it with an error.
WATCHDOG_SECONDS = 4
# Epochs are 32-bit numbers; buffers start anew long before they come round.
MAX_EPOCHS = 2**31
# Contexts shorter than this are gone through by every block of a (token, KV head) pair.
DIRECT_LIMIT = 512
# Keys and values of contexts of which a block has at least so many tokens come through the ring, which keeps
# memory streaming, with so many chunks in flight.
KV_STREAM_SHARE = 128
KV_WINDOW = 6
# Not of contexts longer than so many times a step's average.
KV_SKEW = 2


@dataclass(frozen=True, slots=True)
class TapeModel:
    """What a step reads besides the slot tables, on one device.

    tape: see `pack`. norms [2 * layers + 1, hidden] BF16: input and post-attention norm of each layer,
    final norm. qk_norms [layers, 2, head_dim] and qkv_bias [layers, qkv_size] BF16, where the shape has
    them. embedding [vocab, hidden] BF16. cos_sin [max_len, head_dim] FP32. k_cache, v_cache [layers, pages,
    kv_heads, page_size, head_dim] BF16.
    """

    layout: TapeLayout
    tape: Tensor
    norms: Tensor
    embedding: Tensor
    cos_sin: Tensor
    k_cache: Tensor
    v_cache: Tensor
    rms_norm_eps: float
    scale: float
    qk_norms: Tensor | None = None
    qkv_bias: Tensor | None = None


class _Params(ctypes.Structure):
    """`struct Params` of tape.cu."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("tape", "norms", "qk_norms", "qkv_bias", "embedding", "k_cache", "v_cache")
        ),
        *(
            (name, ctypes.c_void_p)
            for name in ("cos_sin", "page_table", "computed_len", "last_token", "sample_position")
        ),
        *(
            (name, ctypes.c_void_p)
            for name in ("stream", "temperature", "slots", "exchange", "epochs", "logits")
        ),
        ("tokens", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("table_width", "num_pages", "num_slots")),
        *((name, ctypes.c_int) for name in ("kv_stream_limit", "kv_window")),
        *((name, ctypes.c_float) for name in ("eps", "score_scale")),
        *((name, ctypes.c_int) for name in ("window", "direct_limit", "draw", "zero")),
    )


def source() -> str:
    tape, stream = (
        (Path(__file__).parent / name).read_text(encoding="utf-8") for name in ("tape.cu", "kv_stream.cu")
    )
    return tape.replace('#include "kv_stream.cu"\n', stream)


def macros(layout: TapeLayout, tokens: int) -> dict[str, int | str]:
    """What `tape.cu` is compiled with for one bucket of tokens."""
    noise = {"NOISE_GOLDEN": f"{GOLDEN_32}u", "NOISE_MIX_A": f"{MIX_32[0]}u", "NOISE_MIX_B": f"{MIX_32[1]}u"}
    return {
        **defines(layout, tokens),
        **noise,
        "WATCHDOG_NS": f"{WATCHDOG_SECONDS * 10**9}ull",
        "KV_STREAM": 1,
        "KV_SKEW": KV_SKEW,
    }


@functools.cache
def compile_step(layout: TapeLayout, tokens: int, device: torch.device) -> CudaFunction:
    """The kernel for one bucket of tokens, loaded once per process. Raises CompileError or DriverError."""
    plan = plan_block(layout, tokens)
    assert isinstance(plan, BlockPlan)
    cubin = compile_cubin(source(), name="tape", defines=macros(layout, tokens), arch=architecture(device))
    return load_function(cubin, "tape_step", shared_bytes=plan.shared_bytes, device=device)


class TapeStep:
    """One bucket's kernel, see `compile_step`, with its buffers.

    slots [tokens] int64: what a launch reads; a slot beyond the tables is padding. logits [tokens, vocab]
    FP32: what a launch without drawing writes. parameters: the kernel's argument. state, temperature [slots]
    FP32: the slot tables. Launches must follow one another on one stream.
    """

    def __init__(
        self,
        function: CudaFunction,
        model: TapeModel,
        state: SlotState,
        temperature: Tensor,
        tokens: int,
    ) -> None:
        device = model.tape.device
        shape = model.layout.shape
        self.slots = torch.full((tokens,), temperature.shape[0], dtype=torch.int64, device=device)
        self.logits = torch.empty(tokens, shape.vocab_size, dtype=torch.float32, device=device)
        self._exchange = torch.empty(exchange_words(shape, tokens), dtype=torch.int32, device=device)
        self._epochs = torch.empty(NUM_BLOCKS, dtype=torch.int32, device=device)
        self._num_layers = shape.num_layers
        self._kv_stream_limit = KV_STREAM_SHARE * splits(shape, tokens)
        self._clear_exchange()
        self._kept = (model, state, temperature)

        def address(tensor: Tensor | None) -> int | None:
            assert tensor is None or (tensor.is_contiguous() and tensor.device == device)
            return None if tensor is None else tensor.data_ptr()

        tables = (state.computed_len, state.last_token, state.sample_position, state.stream, state.page_table)
        for table in tables:
            assert table.dtype == torch.int64
        self.parameters = _Params(
            tape=address(model.tape),
            norms=address(model.norms),
            qk_norms=address(model.qk_norms),
            qkv_bias=address(model.qkv_bias),
            embedding=address(model.embedding),
            k_cache=address(model.k_cache),
            v_cache=address(model.v_cache),
            cos_sin=address(model.cos_sin),
            page_table=address(state.page_table),
            computed_len=address(state.computed_len),
            last_token=address(state.last_token),
            sample_position=address(state.sample_position),
            stream=address(state.stream),
            temperature=address(temperature),
            slots=address(self.slots),
            exchange=address(self._exchange),
            epochs=address(self._epochs),
            table_width=state.page_table.stride(0),
            num_pages=model.k_cache.shape[1],
            num_slots=temperature.shape[0],
            kv_stream_limit=self._kv_stream_limit,
            kv_window=KV_WINDOW,
            eps=model.rms_norm_eps,
            score_scale=model.scale * LOG2_E,
            window=WINDOW,
            direct_limit=DIRECT_LIMIT,
        )
        self._launch = function.prepare(
            (self.parameters,), grid=NUM_BLOCKS, block=NUM_THREADS, cooperative=True
        )

    def set_tuning(
        self,
        *,
        window: int = WINDOW,
        direct_limit: int = DIRECT_LIMIT,
        kv_stream_limit: int | None = None,
        kv_window: int = KV_WINDOW,
    ) -> None:
        """For measurements. window: chunks in flight per block; kv_window: while keys and values come through
        the ring. direct_limit: contexts from which on they are split, in tokens; kv_stream_limit: from which
        on their keys and values come through the ring, None for the usual one."""
        if kv_stream_limit is None:
            kv_stream_limit = self._kv_stream_limit
        self.parameters.window, self.parameters.direct_limit = window, direct_limit
        self.parameters.kv_stream_limit, self.parameters.kv_window = kv_stream_limit, kv_window

    def draw(self, tokens: Tensor, *, stores_logits: bool = False) -> None:
        """Enqueue a step of `slots`: next tokens into the slot tables and `tokens`. stores_logits: the
        logits into `logits` as well.

        tokens: [N] int64, contiguous, on the device or in page-locked memory; a row that is not padding gets
        its token, -1 where the logits are not finite, so N is at least the last such row's index + 1.
        """
        assert tokens.dtype == torch.int64 and (tokens.is_cuda or tokens.is_pinned())
        self.parameters.tokens = tokens.data_ptr()
        self._enqueue(draw=1, logits=stores_logits)

    def compute_logits(self) -> None:
        """Enqueue a step of `slots` that writes `logits` and leaves the slot tables as they are."""
        self._enqueue(draw=0, logits=True)

    def _enqueue(self, *, draw: int, logits: bool) -> None:
        if self._steps_left == 0:
            self._clear_exchange()
        self._steps_left -= 1
        self.parameters.logits = self.logits.data_ptr() if logits else None
        self.parameters.draw = draw
        self._launch.launch()

    def _clear_exchange(self) -> None:
        """No word carries a valid epoch then, and no vector has arrived; epochs begin with 1."""
        self._exchange.fill_(-1)
        self._epochs.zero_()
        self._steps_left = MAX_EPOCHS // self._num_layers
