"""How do this server and vLLM's compare on this GPU under load, in one run?

    PYTHONPATH=. python3 benchmarks/serve_side_by_side.py --json results.json

Starts `tiny-vllm serve` and `vllm serve` one after the other, each with the same shape (dummy weights, BF16)
and the same tokenizer, and runs `vllm bench serve` from the bundle, unmodified, against both, once per
request rate, and before that once without noting its figures: 320 requests of mixed lengths, so that nothing
is compiled or captured while the clock runs. Throughput and the percentiles of TTFT, TPOT and ITL of each,
and their ratios, go into one file, anew after every run.

Takes some 240 seconds on an H200 and never more than --max-time: what no time is left for is noted and left
out. vLLM starts faster when side_by_side.py has filled its caches before; with --site DIRECTORY the bundle is
installed there and stays, and later commands use it again.

Web packages come from the bundle where the machine has none. What neither has can be carried as wheels:

    pip download --no-deps --only-binary=:all: --python-version 3.12 -d build/wheels NAME
    PYTHONPATH=. python3 benchmarks/serve_side_by_side.py --wheels build/wheels

--check only says which packages are missing, one a line; every run begins with that.

The tokenizer is made here: a byte-level BPE of the model's vocabulary, trained on generated words, so that
nothing must be downloaded and every token that random weights draw has a text.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.side_by_side import PEER_ENVIRONMENT, output_lines

ROOT = Path(__file__).resolve().parents[1]
CLIENT = ROOT / "benchmarks" / "vllm_client.py"
KEPT = (
    *("completed", "failed", "duration", "request_throughput", "output_throughput", "total_token_throughput"),
    *(f"{kind}_{name}_ms" for name in ("ttft", "tpot", "itl") for kind in ("mean", "median", "p99")),
)
HIGHER_IS_BETTER = ("output_throughput",)
LOWER_IS_BETTER = ("median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms")
MIN_PROMPTS = 20
WARM_UP_PROMPTS = 320
OUR_MODULES = (
    *("fastapi", "httptools", "jinja2", "msgspec", "prometheus_client", "pydantic", "safetensors"),
    *("starlette", "tokenizers", "uvicorn", "uvloop", "zmq"),
)
# What vLLM 0.21 imports on its way to a server and to the client, beside torch's own needs.
PEER_MODULES = (
    *("PIL", "aiohttp", "anthropic", "blake3", "cachetools", "cbor2", "cloudpickle", "compressed_tensors"),
    *("cpuinfo", "cv2", "depyf", "diskcache", "einops", "fastapi", "gguf", "httpx", "ijson", "jsonschema"),
    *("lark", "llguidance", "mcp", "mistral_common", "model_hosting_container_standards", "msgspec"),
    *("openai", "openai_harmony", "opentelemetry", "outlines_core", "partial_json_parser"),
    *("prometheus_client", "prometheus_fastapi_instrumentator", "psutil", "pybase64", "pydantic", "regex"),
    *("requests", "sentencepiece", "setproctitle", "tiktoken", "tqdm", "transformers", "uvicorn", "uvloop"),
    *("vllm", "watchfiles", "xgrammar", "yaml", "zmq"),
)


def save_tokenizer(directory: Path, vocab_size: int) -> None:
    """tokenizer.json and tokenizer_config.json of a byte-level BPE over words of random syllables.

    Has vocab_size tokens if that is at most 128,256.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    rng = random.Random(0)
    syllables = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "er", "is")]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(200_000)]
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


def missing_modules(names: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Those that a process in this environment could not import. Nothing is imported to find out."""
    code = "import sys, importlib.util as u; print(*[n for n in sys.argv[1:] if u.find_spec(n) is None])"
    command = [sys.executable, "-c", code, *names]
    run = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    if run.returncode != 0:
        raise RuntimeError(f"{sys.executable} cannot look for packages: {run.stderr[-500:]}")
    return run.stdout.split()


class Budget:
    """Seconds that are left of all."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return max(self._end - time.monotonic(), 0.0)


class Client:
    """The process that runs `vllm bench serve`; see vllm_client.py. log: of what it says by itself."""

    def __init__(self, environment: Mapping[str, str], log: Path) -> None:
        self._environment = environment
        self._log = log
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [sys.executable, str(CLIENT)],
                env={**os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                start_new_session=True,
            )
        self.session = self._process.pid
        self._is_ready = False
        self._forks = True

    def run(self, arguments: Sequence[str], log: Path, limit_s: float) -> None:
        """One command line. Raises RuntimeError if it fails or takes longer."""
        budget = Budget(limit_s)
        code = self._run_fork(arguments, log, budget) if self._forks else None
        if code not in (0, None, -signal.SIGALRM):
            print(f"    a fork ended with {code}, so each run imports by itself: {tail(log)}", flush=True)
            self._forks = False
        if not self._forks:
            code = self._run_alone(arguments, log, budget)
        if code != 0:
            raise RuntimeError(f"vllm bench serve ended with {code} (limit: {limit_s:.0f} s): {tail(log)}")

    def _run_fork(self, arguments: Sequence[str], log: Path, budget: Budget) -> int:
        if not self._is_ready:
            print(f"    vLLM's client was imported in {self._answer(budget.left)['ready']:.1f} s", flush=True)
            self._is_ready = True
        assert self._process.stdin is not None
        job = {"arguments": list(arguments), "log": str(log), "limit_s": budget.left}
        print(json.dumps(job), file=self._process.stdin, flush=True)
        return int(self._answer(budget.left + 5)["code"])

    def _run_alone(self, arguments: Sequence[str], log: Path, budget: Budget) -> int:
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", *arguments]
        with log.open("w") as file, suppress(subprocess.TimeoutExpired):
            environment = {**os.environ, **self._environment}
            return subprocess.run(
                command, env=environment, stdout=file, stderr=file, timeout=budget.left, check=False
            ).returncode
        return -signal.SIGALRM

    def _answer(self, limit_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        timer = threading.Timer(limit_s, self.close)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            raise RuntimeError(f"vLLM's client ended or took longer than {limit_s:.0f} s: {tail(self._log)}")
        content: dict[str, Any] = json.loads(line)
        return content

    def close(self) -> None:
        end_session(self._process, signal.SIGKILL)


def cpu_seconds(session: int) -> dict[str, float]:
    """Of every process that is in this session, by its id; ended children count for who waited for them."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The name, in brackets, may have any characters.
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if int(fields[3]) == session:
                found[stat.parent.name] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return found


def cpu_shares(before: Mapping[str, float], after: Mapping[str, float], seconds: float) -> list[float]:
    """Cores that each process kept busy in between, the busiest first."""
    spent = (value - before.get(process, 0.0) for process, value in after.items())
    return sorted((round(value / seconds, 2) for value in spent if value > 0.05 * seconds), reverse=True)


def tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-1500:] if log.exists() else ""


def end_session(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Signal a process that was started in a session of its own, and all it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


@contextmanager
def running(
    command: Sequence[str], environment: Mapping[str, str], ready_url: str, log: Path, limit_s: float
) -> Iterator[tuple[float, int]]:
    """A server that is ready; yields the seconds that took and the id of its session.

    Raises RuntimeError if it does not get there."""
    start = time.perf_counter()
    with log.open("w") as file:
        process: subprocess.Popen[str] = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdout=file,
            stderr=file,
            text=True,
            start_new_session=True,
        )
    try:
        while not answers(ready_url):
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with {process.returncode}: {tail(log)}")
            if time.perf_counter() - start > limit_s:
                raise RuntimeError(f"the server was not ready after {limit_s:.0f} s: {tail(log)}")
            time.sleep(0.1)
        yield time.perf_counter() - start, process.pid
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        # Its engine must be gone before the next one takes the GPU's memory.
        end_session(process, signal.SIGKILL)
        process.wait()


def answers(url: str) -> bool:
    """Whether a GET succeeds."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServerChoice:
    """How one of the servers is started, and where it says that it is ready."""

    def __init__(self, args: argparse.Namespace, engine: str, model: Path, site: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        common = [str(model), "--port", str(port), "--load-format", "dummy"]
        common += ["--max-model-len", str(args.max_model_len)]
        common += ["--gpu-memory-utilization", str(args.gpu_memory)]
        if engine == "tiny-vllm":
            self.command = [sys.executable, "-m", "tiny_vllm", "serve", *common, *shlex.split(args.options)]
            self.environment, self.ready_url = our_environment(site), f"{self.url}/ready"
        else:
            self.command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *common]
            # Ours writes none either.
            self.command += ["--disable-uvicorn-access-log", *shlex.split(args.peer_options)]
            self.environment, self.ready_url = peer_environment(site), f"{self.url}/health"


def our_environment(site: Path) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"), str(site))))
    return {"PYTHONPATH": path}


def peer_environment(site: Path) -> dict[str, str]:
    return {**PEER_ENVIRONMENT, "PYTHONPATH": str(site)}


def bench_arguments(
    args: argparse.Namespace, rate: str, num_prompts: int, model: Path, url: str, folder: Path
) -> list[str]:
    """Of `vllm bench serve`."""
    arguments = ["bench", "serve", "--backend", "vllm", "--base-url", url, "--model", str(model)]
    arguments += ["--dataset-name", "random", "--random-input-len", str(args.input_len)]
    arguments += ["--random-output-len", str(args.output_len), "--num-prompts", str(num_prompts)]
    arguments += ["--request-rate", rate, "--ignore-eos", "--disable-tqdm", "--temperature", "0"]
    arguments += ["--percentile-metrics", "ttft,tpot,itl", "--metric-percentiles", "99"]
    arguments += ["--save-result", "--result-dir", str(folder), "--result-filename", "result.json"]
    # A seed of its own for each rate, or the second run would find the prompts of the first in the cache.
    return [*arguments, "--seed", str(args.rates.split(",").index(rate) + 1)]


def bench(
    args: argparse.Namespace,
    client: Client,
    rate: str,
    model: Path,
    url: str,
    session: int,
    folder: Path,
    budget: Budget,
) -> dict[str, Any]:
    """One run at one rate. session: of the server's processes."""
    num_prompts = args.num_prompts
    if rate != "inf":
        num_prompts = min(max(MIN_PROMPTS, round(args.seconds * float(rate))), num_prompts)
    result_path = folder / "result.json"
    result_path.unlink(missing_ok=True)
    arguments = bench_arguments(args, rate, num_prompts, model, url, folder)
    before, start = [cpu_seconds(each) for each in (session, client.session)], time.monotonic()
    client.run(arguments, folder / "client.log", budget.left)
    after, seconds = [cpu_seconds(each) for each in (session, client.session)], time.monotonic() - start
    result = json.loads(result_path.read_text(encoding="utf-8"))
    row = {"rate": rate, "num_prompts": num_prompts, **{name: result.get(name) for name in KEPT}}
    row["server_cores"], row["client_cores"] = (
        cpu_shares(earlier, later, seconds) for earlier, later in zip(before, after, strict=True)
    )
    shown = ("completed", "failed", *HIGHER_IS_BETTER, *LOWER_IS_BETTER)
    print("    " + "  ".join(f"{name} {_short(row[name])}" for name in shown), flush=True)
    print(f"    cores of the server {row['server_cores']}, of the client {row['client_cores']}", flush=True)
    return row


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"


def warm_up(
    args: argparse.Namespace, client: Client, model: Path, url: str, folder: Path, budget: Budget
) -> None:
    """Every batch size up to the largest, on the way down, because the outputs end one after another."""
    num_prompts = min(WARM_UP_PROMPTS, args.num_prompts)
    arguments = bench_arguments(args, args.rates.split(",")[0], num_prompts, model, url, folder)
    spread = json.dumps({"input": 0.0, "output": 0.9})
    # The last value of an option counts.
    arguments += ["--request-rate", "inf", "--seed", "0", "--random-range-ratio", spread]
    client.run(arguments, folder / "client.log", budget.left)


def ratios(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of the rates that both have: how many times better ours is, above 1 for every figure."""
    peers = {row["rate"]: row for row in theirs}
    found = []
    for row in ours:
        peer = peers.get(row["rate"])
        if peer is None:
            continue
        entry: dict[str, Any] = {"rate": row["rate"]}
        for name in (*HIGHER_IS_BETTER, *LOWER_IS_BETTER):
            if row.get(name) and peer.get(name):
                is_rate = name in HIGHER_IS_BETTER
                entry[name] = row[name] / peer[name] if is_rate else peer[name] / row[name]
        found.append(entry)
    return found


def run_engine(
    args: argparse.Namespace,
    engine: str,
    client: Client,
    folder: Path,
    site: Path,
    budget: Budget,
    content: dict[str, Any],
    write: Any,
) -> None:
    """All rates of one server; rows are written as they come. Raises RuntimeError."""
    model = folder / args.shape.name
    choice = ServerChoice(args, engine, model, site)
    rows: list[dict[str, Any]] = []
    content[engine] = {"command": shlex.join(choice.command), "rows": rows}
    log = folder / f"{engine}.log"
    with running(choice.command, choice.environment, choice.ready_url, log, budget.left) as (
        seconds,
        session,
    ):
        content[engine]["seconds_to_ready"] = round(seconds, 1)
        print(f"  ready after {seconds:.1f} s", flush=True)
        write()
        warm_up(args, client, model, choice.url, folder, budget)
        for rate in args.rates.split(","):
            print(f"  rate {rate}, {budget.left:.0f} s left", flush=True)
            try:
                rows.append(bench(args, client, rate, model, choice.url, session, folder, budget))
            except RuntimeError as error:
                raise RuntimeError(f"{error}\nthe server said: {tail(log)[-500:]}") from error
            write()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--shape", type=Path, default=ROOT / "benchmarks" / "shapes" / "llama-3.2-1b")
    parser.add_argument("--peer", type=Path, default=ROOT.parent / "shared" / "peers" / "vllm-0.21.0")
    parser.add_argument("--site", type=Path, help="where the bundle is, or is to be installed for good")
    parser.add_argument("--wheels", type=Path, help="packages that neither the machine nor the bundle has")
    parser.add_argument("--check", action="store_true", help="only say which packages are missing")
    parser.add_argument("--engines", default="tiny-vllm,vllm", help="which to run, in this order")
    parser.add_argument("--rates", default="1,8,32,inf", help="requests per second")
    parser.add_argument(
        "--seconds",
        type=float,
        default=12,
        help=f"of arrivals at a finite rate; at least {MIN_PROMPTS} requests",
    )
    parser.add_argument(
        "--num-prompts", type=int, default=1000, help="most in one run, and those at rate inf"
    )
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--gpu-memory", type=float, default=0.6)
    parser.add_argument("--max-time", type=float, default=280, help="seconds for all")
    parser.add_argument("--options", default="", help="more options for tiny-vllm serve, as one string")
    parser.add_argument("--peer-options", default="", help="more options for vllm serve, as one string")
    args = parser.parse_args()
    if unknown := set(args.engines.split(",")) - {"tiny-vllm", "vllm"}:
        parser.error(f"--engines names {', '.join(sorted(unknown))}, but there are tiny-vllm, vllm")
    if not (args.shape / "config.json").is_file():
        parser.error(f"{args.shape} has no config.json")
    return args


def install(args: argparse.Namespace, site: Path, budget: Budget) -> None:
    """The bundle, where it is not yet, and the wheels. Raises RuntimeError."""
    if not (site / "vllm").is_dir():
        command = ["bash", str(args.peer / "install.sh"), str(site)]
        for line in output_lines(command, {"PYTHON": sys.executable}, budget.left):
            print(f"install: {line}", flush=True)
    for wheel in sorted(args.wheels.glob("*.whl")) if args.wheels else ():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)


def report_missing(site: Path) -> int:
    """Print one line per missing package; how many there are."""
    wanted = {
        "tiny-vllm serve": (OUR_MODULES, our_environment(site)),
        "vllm": (PEER_MODULES, peer_environment(site)),
    }
    count = 0
    for program, (names, environment) in wanted.items():
        for name in missing_modules(names, environment):
            print(f"MISSING: {program} imports {name}, which neither this machine nor the bundle has")
            count += 1
    return count


def compare(args: argparse.Namespace, folder: Path, site: Path, budget: Budget) -> list[str]:
    """Run what was asked for. Returns what failed."""
    content: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "ratios": [],
        "failures": [],
    }

    def write() -> None:
        ours, theirs = (content.get(engine, {}).get("rows", []) for engine in ("tiny-vllm", "vllm"))
        content["ratios"] = ratios(ours, theirs)
        if args.json is not None:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    client = Client(peer_environment(site), folder / "client-start.log")
    try:
        model = folder / args.shape.name
        model.mkdir()
        shutil.copy(args.shape / "config.json", model)
        save_tokenizer(model, json.loads((model / "config.json").read_text())["vocab_size"])
        for engine in args.engines.split(","):
            print(f"== {engine}, {budget.left:.0f} s left", flush=True)
            try:
                run_engine(args, engine, client, folder, site, budget, content, write)
            except RuntimeError as error:
                print(f"FAILED: {error}", flush=True)
                content["failures"].append(f"{engine}: {error}")
            write()
    finally:
        client.close()
    for entry in content["ratios"]:
        print(
            "  ".join(
                f"{name} {value if name == 'rate' else f'{value:.2f}x'}" for name, value in entry.items()
            )
        )
    return content["failures"]


def main() -> int:
    args = parse_arguments()
    budget = Budget(args.max_time)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        site = args.site or folder / "site"
        install(args, site, budget)
        if report_missing(site):
            return 1
        if args.check:
            print("nothing is missing")
            return 0
        return 1 if compare(args, folder, site, budget) else 0


if __name__ == "__main__":
    sys.exit(main())
