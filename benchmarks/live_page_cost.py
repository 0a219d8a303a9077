"""What the live page costs the engine: time in reports as a share of time in steps, watched and not.

python -m benchmarks.live_page_cost [--num-pages N] [--json FILE]

The real loop and engine with the bundled model run 16 sequences; messages are encoded as for the API process,
and discarded. Processor time of the engine's thread.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
import time
from pathlib import Path

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
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    options = {} if args.num_pages is None else {"num_pages": args.num_pages}
    engine, config = build_engine(EngineConfig(**options), lambda done, total: None)
    warm_up(engine, config)
    params = SamplingParams(max_tokens=args.max_tokens, ignore_eos=True, seed=1)
    rows = []
    for is_watched in (False, True, False, True):
        now = time.monotonic()
        name = f"{is_watched}{now}"
        requests = [Request(f"{name}{i}", (5, 6, 7, i), params, now) for i in range(NUM_SEQUENCES)]
        channel = Discard([Watch(is_watched), Add(0, requests)])
        loop = TimedLoop(engine, channel)
        loop.run()
        row = {
            "watched": is_watched,
            "pages": config.num_pages,
            "reports": channel.num_reports,
            "bytes_per_report": round(channel.num_bytes / channel.num_reports),
            "report_ms": round(1e3 * loop.report_seconds, 2),
            "step_seconds": round(channel.step_seconds, 3),
            "share": round(loop.report_seconds / channel.step_seconds, 6),
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    if args.json is not None:
        command = shlex.join(["python", "-m", "benchmarks.live_page_cost", *sys.argv[1:]])
        content = {"command": command, "date": time.strftime("%Y-%m-%d"), "python": platform.python_version()}
        args.json.write_text(json.dumps(content | {"rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
