"""What the live page costs the engine: time in reports as a share of time in steps, watched and not.

python benchmarks/live_page_cost.py [--num-pages N]

The real loop and engine with the bundled model run 16 sequences; messages are encoded as for the API process,
and discarded. Processor time of the engine's thread.
"""

from __future__ import annotations

import argparse
import time

from tiny_vllm.config import EngineConfig
from tiny_vllm.serving.engine_loop import EngineLoop
from tiny_vllm.serving.engine_process import build_engine
from tiny_vllm.serving.messages import Add, FromEngine, Quit, Report, ToEngine, Watch, encode
from tiny_vllm.serving.warm_up import warm_up
from tiny_vllm.types import Request, SamplingParams

NUM_SEQUENCES = 16


class Discard:
    """A channel that hands over what it was given, and then asks to quit when the engine is idle."""

    def __init__(self, messages: list[ToEngine]) -> None:
        self._messages = messages
        self.num_reports = 0
        self.num_bytes = 0
        self.step_seconds = 0.0

    def receive(self, timeout: float) -> list[ToEngine]:
        messages, self._messages = self._messages, []
        return messages or ([Quit()] if timeout else [])

    def send(self, message: FromEngine) -> None:
        data = encode(message)
        if isinstance(message, Report):
            self.num_reports += 1
            self.num_bytes += len(data)
            self.step_seconds = message.step_seconds


class TimedLoop(EngineLoop):
    report_seconds = 0.0

    def _report(self) -> None:
        start = time.thread_time()
        super()._report()
        self.report_seconds += time.thread_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-pages", type=int)
    parser.add_argument("--max-tokens", type=int, default=100)
    args = parser.parse_args()
    options = {} if args.num_pages is None else {"num_pages": args.num_pages}
    engine, config = build_engine(EngineConfig(**options), lambda done, total: None)
    warm_up(engine, config)
    params = SamplingParams(max_tokens=args.max_tokens, ignore_eos=True, seed=1)
    for is_watched in (False, True, False, True):
        now = time.monotonic()
        name = f"{is_watched}{now}"
        requests = [Request(f"{name}{i}", (5, 6, 7, i), params, now) for i in range(NUM_SEQUENCES)]
        channel = Discard([Watch(is_watched), Add(0, requests)])
        loop = TimedLoop(engine, channel)
        loop.run()
        share = loop.report_seconds / channel.step_seconds
        print(
            f"{'watched' if is_watched else 'not watched':12} {config.num_pages} pages: "
            f"{channel.num_reports} reports of {channel.num_bytes / channel.num_reports:.0f} bytes, "
            f"{1e3 * loop.report_seconds:.1f} ms beside {channel.step_seconds:.2f} s of steps: {share:.3%}"
        )


if __name__ == "__main__":
    main()
