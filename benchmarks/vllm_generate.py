"""What does a token cost through vLLM's `LLM.generate`? The other half of side_by_side.py, which starts it.

    PYTHONPATH=WHERE_VLLM_IS:. python3 benchmarks/vllm_generate.py --model DIRECTORY

Dummy weights, greedy, random prompts, no prefix caching; a step is what a call takes beyond one for a single
token, as `tiny-vllm bench decode --end-to-end` counts it. --workloads are those of `tiny-vllm bench
throughput`, request for request. Rounds before the timed ones (--num-warmup) are what the two run there, too.
Prints one JSON object per line of results.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from typing import Any

from tiny_vllm.cli.bench_workloads import make_workload


def emit(**row: Any) -> None:
    print(json.dumps(row), flush=True)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a directory with a config.json")
    parser.add_argument("--batch-sizes", type=numbers, default=[1, 2, 4, 8, 64])
    parser.add_argument("--input-lens", type=numbers, default=[128])
    parser.add_argument("--output-len", type=int, default=512)
    parser.add_argument("--workloads", default="", help="names and shapes, such as nano-vllm,256x128+512")
    parser.add_argument("--num-iters", type=int, default=3)
    parser.add_argument("--num-warmup", type=int, default=1, help="rounds of each line before the timed ones")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.6)
    args = parser.parse_args()

    start = time.perf_counter()
    import vllm

    imported = time.perf_counter() - start
    with open(f"{args.model}/config.json", encoding="utf-8") as file:
        vocab_size = json.load(file)["vocab_size"]
    workloads = [make_workload(name, vocab_size) for name in args.workloads.split(",") if name]
    longest = max([*args.input_lens, 0]) + args.output_len
    # Room for the longest line, and no less than the peer's usual setting.
    llm = vllm.LLM(
        model=args.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enable_prefix_caching=False,
        max_model_len=max([4096, longest, *(workload.longest for workload in workloads)]),
        gpu_memory_utilization=args.gpu_memory_utilization,
        max_num_seqs=max([256, *args.batch_sizes]),
        seed=0,
    )
    ready = time.perf_counter() - start
    emit(
        measure="start",
        version=vllm.__version__,
        seconds_to_import=imported,
        seconds_to_ready=ready,
        num_iters=args.num_iters,
        num_warmup=args.num_warmup,
    )
    generator = random.Random(0)

    def seconds_of(prompts: list[Any], params: list[Any]) -> float:
        begin = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        assert all(
            len(output.outputs[0].token_ids) == wanted.max_tokens
            for output, wanted in zip(outputs, params, strict=True)
        )
        return seconds

    def sampling(temperature: float, output_len: int) -> Any:
        return vllm.SamplingParams(
            temperature=temperature, max_tokens=output_len, ignore_eos=True, detokenize=False
        )

    def timed_call(batch_size: int, input_len: int, output_len: int) -> float:
        prompts = [
            {"prompt_token_ids": generator.choices(range(vocab_size), k=input_len)} for _ in range(batch_size)
        ]
        return seconds_of(prompts, [sampling(0.0, output_len)] * batch_size)

    for input_len in args.input_lens:
        for batch_size in args.batch_sizes:
            warmup = [timed_call(batch_size, input_len, args.output_len) for _ in range(args.num_warmup)]
            whole, first = [], []
            for _ in range(args.num_iters):
                whole.append(timed_call(batch_size, input_len, args.output_len))
                first.append(timed_call(batch_size, input_len, 1))
            total, prompt = statistics.median(whole), statistics.median(first)
            emit(
                measure="generate",
                batch_size=batch_size,
                input_len=input_len,
                output_len=args.output_len,
                us_per_step=(total - prompt) / (args.output_len - 1) * 1e6,
                output_tokens_per_s=batch_size * args.output_len / total,
                seconds_per_call=total,
                seconds_to_first_token=prompt,
                spread=(max(whole) - min(whole)) / total,
                seconds_of_warmup=sum(warmup),
            )

    for workload in workloads:
        prompts = [{"prompt_token_ids": list(item.prompt_token_ids)} for item in workload.items]
        params = [sampling(workload.temperature, item.output_len) for item in workload.items]
        warmup = [seconds_of(prompts[:1], params[:1])]
        warmup += [seconds_of(prompts, params) for _ in range(args.num_warmup)]
        rounds = [seconds_of(prompts, params) for _ in range(args.num_iters)]
        seconds = statistics.median(rounds)
        emit(
            measure="generate all",
            workload=workload.name,
            prompt_tokens=workload.num_prompt_tokens,
            output_tokens=workload.num_output_tokens,
            seconds=seconds,
            seconds_of_rounds=rounds,
            seconds_of_warmup=sum(warmup),
            prompt_tokens_per_s=workload.num_prompt_tokens / seconds,
            output_tokens_per_s=workload.num_output_tokens / seconds,
        )


if __name__ == "__main__":
    main()
