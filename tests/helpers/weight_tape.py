"""Runs the weight tape's kernel on the CPU, see weight_tape_emulator.h."""

from __future__ import annotations

import ctypes
import functools
import re
import subprocess
import tempfile
from pathlib import Path

from tiny_vllm.kernels.weight_tape.layout import TapeLayout, plan_block
from tiny_vllm.kernels.weight_tape.step import NUM_THREADS, macros, source

HERE = Path(__file__).parent
# A text of the assembly -> the function of emulated::ptx that stands for it.
PTX = {
    "%%globaltimer": "globaltimer",
    "mbarrier.init": "mbarrier_init",
    "mbarrier.arrive.expect_tx": "mbarrier_expect",
    "mbarrier.arrive.shared": "mbarrier_arrive",
    "mbarrier.try_wait": "mbarrier_try_wait",
    "cp.async.bulk": "bulk_copy",
    "ld.relaxed.gpu.global.v4.u32": "load4",
    "ld.relaxed.gpu.global.u64": "load2",
    "st.relaxed.gpu.global.u64": "store2",
    "st.relaxed.gpu.global.u16": "store_half",
    "max.NaN.bf16x2": "any_nan",
    "cvt.rn.bf16x2.f32": "pack",
    "mul.rn.bf16x2": "multiply2",
    "ex2.approx": "exp2",
    "mma.sync.aligned.m16n8k16": "mma",
    "movmatrix": "transpose",
    "%%tid.x": "tid",
    "%%ctaid.x": "ctaid",
    "createpolicy": "policy",
    "bar.sync": "bar_sync",
    "bar.arrive": "bar_arrive",
    "prefetch": "nothing",
    "fence": "nothing",
}
SHARED = "extern __shared__ __align__(1024) u8 memory[];"
FAILED = "DEV void failed() {"
ENTRY = """
static Params emulated_params;
extern "C" const char* run_emulated(const void* params, int threads, unsigned shared, unsigned seed,
                                    int rounds) {
  memcpy(&emulated_params, params, sizeof emulated_params);
  emulated::dice.seed(seed);
  emulated::body = [] { tape_step(emulated_params); };
  emulated::run(CTAS, threads, shared, rounds);
  return emulated::failure.c_str();
}
extern "C" unsigned size_of_params() { return sizeof(Params); }
"""


def _split(text: str, separator: str) -> list[str]:
    """At separators outside of brackets and strings."""
    parts, depth, quoted = [""], 0, False
    for before, character in zip(" " + text, text, strict=False):
        if character == '"' and before != "\\":
            quoted = not quoted
        if not quoted:
            depth += (character in "([{") - (character in ")]}")
        if character == separator and depth == 0 and not quoted:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _without_assembly(text: str) -> str:
    pieces, position = [], 0
    for found in re.finditer(r"\basm( volatile)?\(", text):
        pieces.append(text[position : found.start()])
        end, depth, quoted = found.end(), 1, False
        while depth:
            if text[end] == '"' and text[end - 1] != "\\":
                quoted = not quoted
            if not quoted:
                depth += (text[end] == "(") - (text[end] == ")")
            end += 1
        template, *groups = _split(text[found.end() : end - 1], ":")
        (name,) = [name for key, name in PTX.items() if key in template][:1]
        operands = [
            re.sub(r'^\s*"[^"]*"\s*', "", operand)
            for group in groups[:2]
            for operand in _split(group, ",")
            if operand.strip()
        ]
        if name.startswith("bar_"):
            operands = re.findall(r"\d+", template)
        pieces.append(f"emulated::ptx::{name}({', '.join(operands)})")
        position = end
    return "".join([*pieces, text[position:]])


@functools.cache
def _library(defines: tuple[tuple[str, int | str], ...], mistake: tuple[str, str] | None) -> ctypes.CDLL:
    kernel = source()
    if mistake is not None:
        assert kernel.count(mistake[0]) == 1, f"not once in the kernel: {mistake[0]}"
        kernel = kernel.replace(*mistake)
    assert kernel.count(SHARED) == 1 and kernel.count(FAILED) == 1
    kernel = kernel.replace(SHARED, "u8* const memory = emulated::shared_memory();")
    kernel = kernel.replace(FAILED, FAILED + " emulated::yield();")
    emulator = (HERE / "weight_tape_emulator.h").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "emulated.so"
        options = [f"-D{name}={value}" for name, value in defines]
        command = ["g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(path)]
        text = "\n".join((emulator, _without_assembly(kernel), ENTRY))
        compiled = subprocess.run([*command, *options], input=text, capture_output=True, text=True)
        assert compiled.returncode == 0, compiled.stderr[:6000]
        library = ctypes.CDLL(str(path))
    library.run_emulated.restype = ctypes.c_char_p
    return library


class EmulatedFunction:
    """In the place of a `CudaFunction` of `compile_step`. mistake: a text of the kernel and what to put in
    its place. Launches raise RuntimeError where the kernel is stuck or breaks a rule of the device."""

    def __init__(
        self, layout: TapeLayout, tokens: int = 1, *, mistake: tuple[str, str] | None = None
    ) -> None:
        plan = plan_block(layout, tokens)
        assert plan is not None
        self._shared_bytes = plan.shared_bytes
        self._library = _library(tuple(macros(layout, tokens).items()), mistake)
        self._max_rounds = 2500 * (layout.shape.num_layers + 1)
        self.seed = 0

    def prepare(
        self, arguments: tuple[ctypes.Structure, ...], *, grid: int, block: int, cooperative: bool
    ) -> EmulatedFunction:
        (self._params,) = arguments
        assert block == NUM_THREADS and cooperative
        assert self._library.size_of_params() == ctypes.sizeof(self._params)
        return self

    def launch(self) -> None:
        self.seed += 1
        problem = self._library.run_emulated(
            ctypes.byref(self._params), NUM_THREADS, self._shared_bytes, self.seed, self._max_rounds
        )
        if problem:
            raise RuntimeError(problem.decode())
