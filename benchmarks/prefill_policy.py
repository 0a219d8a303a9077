"""Which prefill policy and token budget keep a CPU's answers flowing while prompts arrive?

    PYTHONPATH=. python benchmarks/prefill_policy.py [--interval 0.22] [--rounds 2]

The bundled model's engine; 40 requests at a fixed interval, prompts of 32 to 400 tokens, 16 to 95 new tokens.
Prints throughput, time to first token, and the gaps between tokens.
"""

from __future__ import annotations

import argparse
import random
import time

from tiny_vllm.config import EngineConfig
from tiny_vllm.engine.build import build_engine, plan_engine
from tiny_vllm.types import Request, SamplingParams

NUM_REQUESTS = 40
CASES = (("mixed", 256), ("exclusive", 256), ("mixed", 512), ("exclusive", 512))


def make_requests() -> list[tuple[tuple[int, ...], SamplingParams]]:
    rng = random.Random(0)
    return [
        (
            tuple(rng.randrange(100, 40_000) for _ in range(rng.randrange(32, 400))),
            SamplingParams(temperature=0, ignore_eos=True, max_tokens=rng.randrange(16, 96)),
        )
        for _ in range(NUM_REQUESTS)
    ]


def run(policy: str, budget: int, interval: float) -> str:
    config = EngineConfig.from_options({"prefill_policy": policy, "max_num_batched_tokens": budget})
    engine = build_engine(plan_engine(config))
    waits: list[float] = []
    gaps: list[float] = []
    newest: dict[str, float] = {}
    pending = [
        Request(str(number), prompt, sampling, engine.clock() + number * interval)
        for number, (prompt, sampling) in enumerate(make_requests())
    ]
    start = engine.clock()
    while pending or engine.has_work:
        while pending and engine.clock() >= pending[0].arrival_time:
            request = pending.pop(0)
            engine.add(request)
            newest[request.request_id] = -request.arrival_time
        if not engine.has_work:
            time.sleep(0.001)
            continue
        events = engine.step()
        now = engine.clock()
        for event in events:
            before = newest[event.request_id]
            # Negative: the arrival, because there is no token yet.
            (waits if before < 0 else gaps).append(now - abs(before))
            newest[event.request_id] = now
    seconds = engine.clock() - start

    def ms(values: list[float], share: float) -> str:
        return f"{sorted(values)[int(len(values) * share)] * 1e3:.0f}"

    return (
        f"{policy:9} {budget:4}  {(len(waits) + len(gaps)) / seconds:6.1f} tokens/s  "
        f"first token p50 {ms(waits, 0.5)} p95 {ms(waits, 0.95)} ms  "
        f"gaps p50 {ms(gaps, 0.5)} p95 {ms(gaps, 0.95)} p99 {ms(gaps, 0.99)} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--interval", type=float, default=0.22, help="seconds between requests")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    for _ in range(args.rounds):
        for policy, budget in CASES:
            print(run(policy, budget, args.interval), flush=True)


if __name__ == "__main__":
    main()
