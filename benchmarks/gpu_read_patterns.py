"""What is left of the rate at which the card can be read when it is read as decode attention does?

    PYTHONPATH=. python3 benchmarks/gpu_read_patterns.py --json patterns.json

Bulk copies of pieces into shared memory (read_patterns.cu), and nothing else: no scores, no queries. All
orders read the same buffer once, a launch being as long as a layer's attention (--megabytes, 419 is 256
sequences of 800 tokens of Llama-3.2-1B) or much longer.

run       all blocks together read one run of memory, as `read_probe` does
shares    each block reads a run of its own
pieces    each block reads pieces from all over the buffer, as from pages in random order
heads     the same in groups of eight pieces that lie next to each other, of which eight blocks read one
          each, as attention's blocks read a page's heads
grouped   the same groups, each read by one block

A launch's time has its beginning and end in it; `rate` is the best of the windows, bytes in flight per
multiprocessor, and `rates` has all.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu_timing import Report, time_graph
from tiny_vllm.kernels.cuda.driver import CudaFunction, load_function
from tiny_vllm.kernels.cuda.nvrtc import compile_cubin

DEVICE = torch.device("cuda", 0)
SOURCE = Path(__file__).with_name("read_patterns.cu")
ARCH = "sm_90a"
STAGE_BYTES = 8192
PIECES = (2048, 4096, 8192)
WINDOWS = (65536, 98304, 131072, 196608)  # bytes in flight per multiprocessor
GROUP = 8


def defines(piece_bytes: int, stages: int, is_streaming: bool) -> dict[str, int | str]:
    return {
        "PIECE_BYTES": piece_bytes,
        "PIECES": STAGE_BYTES // piece_bytes,
        "STAGES": stages,
        "STREAMING": int(is_streaming),
    }


def compile_reader(piece_bytes: int, stages: int, is_streaming: bool) -> bytes:
    source = SOURCE.read_text(encoding="utf-8")
    return compile_cubin(
        source, name="read_patterns", defines=defines(piece_bytes, stages, is_streaming), arch=ARCH
    )


def in_run(blocks: int, count: int) -> Tensor:
    return torch.arange(blocks * count).view(count, blocks).T


def in_shares(blocks: int, count: int) -> Tensor:
    return torch.arange(blocks * count).view(blocks, count)


def in_pieces(blocks: int, count: int) -> Tensor:
    return torch.randperm(blocks * count).view(blocks, count)


def in_heads(blocks: int, count: int) -> Tensor:
    """Blocks b, b + 1, .. of eight have a piece of each group, in another order each."""
    groups = torch.randperm(blocks * count // GROUP).view(blocks // GROUP, count)
    orders = [groups[:, torch.randperm(count)] * GROUP + head for head in range(GROUP)]
    return torch.stack(orders, 1).reshape(blocks, count)


def in_groups(blocks: int, count: int) -> Tensor:
    groups = torch.randperm(blocks * count // GROUP)[:, None] * GROUP + torch.arange(GROUP)
    return groups.reshape(blocks, count)


ORDERS: dict[str, Callable[[int, int], Tensor]] = {
    "run": in_run,
    "shares": in_shares,
    "pieces": in_pieces,
    "heads": in_heads,
    "grouped": in_groups,
}


def read(function: CudaFunction, data: Tensor, order: Tensor, first_words: Tensor) -> Tensor:
    arguments = (
        ctypes.c_void_p(data.data_ptr()),
        ctypes.c_void_p(order.data_ptr()),
        ctypes.c_int(order.shape[1]),
        ctypes.c_void_p(first_words.data_ptr()),
    )
    function.launch(len(order), 32, arguments)
    return first_words


def measure(report: Report, num_bytes: int, piece_bytes: int, name: str, blocks_each: int) -> None:
    units = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    blocks = units * blocks_each
    count = num_bytes // piece_bytes // blocks // 32 * 32
    order = ORDERS[name](blocks, count).to(torch.uint32).to(DEVICE).contiguous()
    size = blocks * count * piece_bytes
    # Buffers push each other out of the L2 cache.
    buffers = [
        torch.empty(size // 4, dtype=torch.int32, device=DEVICE).random_()
        for _ in range(max(1, -(-(1 << 30) // size)))
    ]
    first_words = torch.empty(blocks, dtype=torch.uint32, device=DEVICE)
    rates = {}
    for window in WINDOWS:
        stages = window // STAGE_BYTES // blocks_each
        for is_streaming in (True, False):
            cubin = compile_reader(piece_bytes, stages, is_streaming)
            function = load_function(
                cubin, "read_pieces", shared_bytes=stages * (STAGE_BYTES + 8), device=DEVICE
            )

            def run(function: CudaFunction = function) -> list[Tensor]:
                return [read(function, buffer, order, first_words) for buffer in buffers]

            seconds = time_graph(run, rounds=5, replays=4) / len(buffers)
            rates[f"{window // 1024} KiB{'' if is_streaming else ', kept'}"] = size / seconds / 1e12
    best = max(rates, key=lambda key: rates[key])
    report.add(
        order=name, piece_bytes=piece_bytes, megabytes=size / 1e6, blocks_each=blocks_each, best=best,
        rate=rates[best], rates={key: round(rate, 3) for key, rate in rates.items()},
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--megabytes", default="419,2500")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    report = Report(arguments.json)
    tasks = [
        (piece, window // STAGE_BYTES // each, is_streaming)
        for piece in PIECES
        for window in WINDOWS
        for each in (1, 2)
        for is_streaming in (True, False)
    ]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda task: compile_reader(*task), tasks))
    for megabytes in map(int, arguments.megabytes.split(",")):
        for piece_bytes in PIECES:
            for name in ORDERS:
                # Eights of blocks: there are 132 multiprocessors.
                for each in (2,) if megabytes > 1000 or name == "heads" else (1, 2):
                    section = f"{megabytes} MB, {name} of {piece_bytes}"
                    report.section(
                        section, partial(measure, report, megabytes * 10**6, piece_bytes, name, each)
                    )


if __name__ == "__main__":
    main()
