"""Runs `vllm` command lines, each in a fork of one process that has imported vLLM.

serve_side_by_side.py starts it: importing takes many seconds, and a comparison has ten such runs.

Reads from stdin one JSON object a line: {"arguments": [...], "log": FILE, "limit_s": SECONDS}. Writes to
stdout {"ready": SECONDS} and then for each line {"code": EXIT_CODE}; -N: signal N ended the run, 14 if it
took longer than limit_s. What a run prints goes to its log.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from typing import Any, TextIO


def import_vllm() -> None:
    """Everything that the command line imports before it looks at its arguments, and then for `bench`."""
    import vllm.benchmarks.serve
    import vllm.entrypoints.cli.benchmark.main
    import vllm.entrypoints.cli.benchmark.serve
    import vllm.entrypoints.cli.collect_env
    import vllm.entrypoints.cli.launch
    import vllm.entrypoints.cli.main
    import vllm.entrypoints.cli.openai
    import vllm.entrypoints.cli.run_batch
    import vllm.entrypoints.cli.serve  # noqa: F401


def run(job: dict[str, Any]) -> int:
    """The exit code of one command line."""
    child = os.fork()
    if child == 0:
        run_here(job)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def run_here(job: dict[str, Any]) -> None:
    """Become the command; does not return."""
    code = 1
    try:
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for number in (1, 2):
            os.dup2(log, number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        # Its default action ends the process.
        signal.setitimer(signal.ITIMER_REAL, job["limit_s"])
        from vllm.entrypoints.cli.main import main

        sys.argv = ["vllm", *job["arguments"]]
        main()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def answer(stream: TextIO, **content: Any) -> None:
    print(json.dumps(content), file=stream, flush=True)


def main() -> None:
    # vLLM logs to stdout.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    start = time.perf_counter()
    import_vllm()
    answer(answers, ready=time.perf_counter() - start)
    for line in sys.stdin:
        answer(answers, code=run(json.loads(line)))


if __name__ == "__main__":
    main()
