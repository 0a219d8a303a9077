"""How do this server and vLLM's compare on this GPU under load, in one run?

    PYTHONPATH=. python3 benchmarks/serve_side_by_side.py --json results.json

Starts `tiny-vllm serve` and `vllm serve` one after the other, each with the same shape (dummy weights, BF16)
and the same tokenizer, and runs `vllm bench serve` from the bundle, unmodified, against both, once per
request rate. Writes throughput and the percentiles of TTFT, TPOT and ITL of each into one file, anew after
every run.
The web packages of both servers come from the bundle where the machine has none.

The tokenizer is made here: a byte-level BPE trained on generated words, so that nothing must be downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.side_by_side import PEER_ENVIRONMENT, output_lines

ROOT = Path(__file__).resolve().parents[1]
KEPT = (
    *("completed", "failed", "duration", "request_throughput", "output_throughput", "total_token_throughput"),
    *(f"{kind}_{name}_ms" for name in ("ttft", "tpot", "itl") for kind in ("mean", "median", "p99")),
)


def save_tokenizer(directory: Path, vocab_size: int = 32_000) -> None:
    """tokenizer.json and tokenizer_config.json of a byte-level BPE over words of random syllables."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    rng = random.Random(0)
    syllables = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "er", "is")]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(60_000)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(words[i : i + 100]) for i in range(0, len(words), 100)], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


@contextmanager
def running(
    command: list[str], environment: dict[str, str], url: str, log: Path, limit_s: float
) -> Iterator[float]:
    """A server that is ready; yields the seconds that took. Raises RuntimeError if it does not get there."""
    start = time.perf_counter()
    with log.open("w") as file:
        process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=file, stderr=file)
    try:
        while True:
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=5):
                    break
            except OSError:
                pass
            if process.poll() is not None or time.perf_counter() - start > limit_s:
                raise RuntimeError(f"the server did not start: {log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield time.perf_counter() - start
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def bench(
    args: argparse.Namespace, rate: str, model: Path, url: str, site: Path, folder: Path
) -> dict[str, Any]:
    """One run of `vllm bench serve`."""
    # About twenty seconds of arrivals for each finite rate.
    num_prompts = (
        args.num_prompts if rate == "inf" else max(20, min(args.num_prompts, round(20 * float(rate))))
    )
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "vllm"]
    command += ["--base-url", url, "--model", str(model), "--dataset-name", "random"]
    command += ["--random-input-len", str(args.input_len), "--random-output-len", str(args.output_len)]
    command += ["--num-prompts", str(num_prompts), "--request-rate", rate, "--ignore-eos", "--disable-tqdm"]
    # A seed of its own for each rate, or the second run would find the prompts of the first in the cache.
    command += ["--seed", str(args.rates.split(",").index(rate)), "--percentile-metrics", "ttft,tpot,itl"]
    command += ["--metric-percentiles", "99", "--save-result", "--result-dir", str(folder)]
    command += ["--result-filename", "result.json", "--temperature", "0"]
    environment = {**PEER_ENVIRONMENT, "PYTHONPATH": str(site)}
    for line in output_lines(command, environment, args.limit):
        if "throughput" in line or "P99" in line or "Failed" in line:
            print(f"    {line}", flush=True)
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return {"rate": rate, "num_prompts": num_prompts, **{name: result.get(name) for name in KEPT}}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def servers(
    args: argparse.Namespace, model: Path, port: int, site: Path
) -> dict[str, tuple[list[str], dict[str, str]]]:
    common = [
        str(model),
        "--port",
        str(port),
        "--load-format",
        "dummy",
        "--max-model-len",
        str(args.max_model_len),
    ]
    memory = ["--gpu-memory-utilization", str(args.gpu_memory)]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"), str(site))))
    ours = [sys.executable, "-m", "tiny_vllm", "serve", *common, *memory, *shlex.split(args.options)]
    theirs = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *common, *memory]
    return {
        "tiny-vllm": (ours, {"PYTHONPATH": path}),
        "vllm": (theirs, {**PEER_ENVIRONMENT, "PYTHONPATH": str(site)}),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--shape", type=Path, default=ROOT / "benchmarks" / "shapes" / "llama-3.2-1b")
    parser.add_argument("--peer", type=Path, default=ROOT.parent / "shared" / "peers" / "vllm-0.21.0")
    parser.add_argument("--site", type=Path, help="where the bundle is installed already")
    parser.add_argument("--engines", default="tiny-vllm,vllm")
    parser.add_argument("--rates", default="1,8,32,inf")
    parser.add_argument("--num-prompts", type=int, default=1000)
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--gpu-memory", type=float, default=0.6)
    parser.add_argument("--limit", type=float, default=240, help="seconds for a start, and for each run")
    parser.add_argument("--options", default="", help="more options for tiny-vllm serve, as one string")
    args = parser.parse_args()
    content: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "failures": [],
    }

    def write() -> None:
        if args.json is not None:
            args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        site = args.site or folder / "site"
        if args.site is None:
            for line in output_lines(
                ["bash", str(args.peer / "install.sh"), str(site)], {"PYTHON": sys.executable}, 240
            ):
                print(f"install: {line}", flush=True)
        model = folder / args.shape.name
        model.mkdir()
        shutil.copy(args.shape / "config.json", model)
        save_tokenizer(model)
        for engine in args.engines.split(","):
            print(f"== {engine}", flush=True)
            port = free_port()
            url = f"http://127.0.0.1:{port}"
            command, environment = servers(args, model, port, site)[engine]
            rows: list[dict[str, Any]] = []
            content[engine] = {"command": shlex.join(command), "rows": rows}
            try:
                with running(command, environment, url, folder / f"{engine}.log", args.limit) as seconds:
                    content[engine]["seconds_to_ready"] = round(seconds, 1)
                    print(f"  ready after {seconds:.1f} s", flush=True)
                    for rate in args.rates.split(","):
                        print(f"  rate {rate}", flush=True)
                        rows.append(bench(args, rate, model, url, site, folder))
                        write()
            except RuntimeError as error:
                print(f"FAILED: {error}", flush=True)
                content["failures"].append(f"{engine}: {error}")
            write()
    return 1 if content["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
