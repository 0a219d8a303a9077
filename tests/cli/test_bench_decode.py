from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny_vllm.cli import bench_decode, bench_rows, decode_workload
from tiny_vllm.cli.decode_workload import DecodeModel, DecodeWorkload
from tiny_vllm.cli.machine import ReadLimit, measure_read_limit, step_bytes
from tiny_vllm.cli.main import main
from tiny_vllm.config import EngineConfig
from tiny_vllm.engine import build
from tiny_vllm.engine.build import plan_engine
from tiny_vllm.weights.load import load_weights

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
LIMIT = ReadLimit(2e9, "made up for a test", {"slow": 1e9})
FAST = ("--batch-sizes", "1,3", "--contexts", "9,30", "--num-steps", "4", "--num-rounds", "2")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A directory with nothing but a tiny configuration of BF16, which counts; the read limit is not
    measured."""
    monkeypatch.setattr(bench_rows, "measure_read_limit", lambda device: LIMIT)
    monkeypatch.setattr(build, "_has_bf16_instructions", lambda: True)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


def bench(model: str, *arguments: str) -> int:
    return main(["bench", "decode", "--model", model, "--load-format", "dummy", *FAST, *arguments])


def report_of(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


@pytest.mark.parametrize(("has_bf16", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_every_batch_and_context_gets_a_line(
    has_bf16: bool,
    dtype: str,
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(build, "_has_bf16_instructions", lambda: has_bf16)
    assert bench(model, "--json", "-", "--device", "cpu") == 0
    report = report_of(capsys)
    assert [(row["batch_size"], row["context"]) for row in report["rows"]] == [
        (1, 9),
        (1, 30),
        (3, 9),
        (3, 30),
    ]
    spec = plan_engine(EngineConfig(model=model, load_format="dummy")).checkpoint.spec
    for row in report["rows"]:
        assert row["measure"] == "step"
        assert row["us_per_token"] * row["batch_size"] == pytest.approx(row["us_per_step"])
        # Four steps, so the context is longer by 1.5 on average.
        num_bytes = step_bytes(spec, dtype, row["batch_size"], row["context"] + 1.5)
        assert row["gb_per_s"] * row["us_per_step"] * 1e3 == pytest.approx(num_bytes)
        assert row["share"] == pytest.approx(row["gb_per_s"] / 2)


def test_the_report_says_what_was_measured_where_and_when(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bench(model, "--json", "-", "--device", "cpu")
    report = report_of(capsys)
    assert report["benchmark"] == "decode"
    assert report["date"].endswith("+00:00") and report["command"]
    assert report["machine"]["torch"] == torch.__version__
    assert report["model"]["hidden_size"] == 64 and report["engine"]["dtype"] == "bfloat16"
    assert report["options"]["batch_sizes"] == [1, 3] and report["options"]["num_steps"] == 4
    assert report["read_limit"]["method"] == LIMIT.method
    assert report["failures"] == []


def test_calls_of_generate_get_lines_of_their_own(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--no-step", "--end-to-end", "--input-lens", "5,17", "--output-len", "4", "--num-iters", "1")
    assert bench(model, *arguments, "--json", "-", "--device", "cpu") == 0
    start, *rows = report_of(capsys)["rows"]
    assert 0 < start["seconds_to_ready"] < start["seconds_to_first_token"]
    assert [(row["input_len"], row["batch_size"]) for row in rows] == [(5, 1), (5, 3), (17, 1), (17, 3)]
    for row in rows:
        step = (row["seconds_per_call"] - row["seconds_to_first_token"]) / 3
        assert row["us_per_step"] == pytest.approx(step * 1e6)
        assert row["output_tokens_per_s"] * row["seconds_per_call"] == pytest.approx(row["batch_size"] * 4)


@pytest.mark.parametrize("num_warmup", [0, 1, 2])
def test_whole_calls_run_before_the_clock_does(
    num_warmup: int, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[int, int, int, int]] = []

    def note(llm: Any, batch_size: int, input_len: int, output_len: int, *, seed: int) -> float:
        calls.append((batch_size, input_len, output_len, seed))
        return float(output_len)

    monkeypatch.setattr(bench_decode, "timed_call", note)
    arguments = ("--no-step", "--end-to-end", "--input-lens", "5", "--output-len", "4", "--num-iters", "2")
    more = ("--batch-sizes", "1", "--num-warmup", str(num_warmup), "--json", "-", "--device", "cpu")
    assert bench(model, *arguments, *more) == 0
    report = report_of(capsys)
    assert report["options"]["num_warmup"] == num_warmup
    assert report["rows"][1]["seconds_of_warmup"] == 4 * num_warmup
    # The start's call, and then those of the line; no two have the same prompts.
    assert [output_len for *_, output_len, _ in calls] == [1, *[4] * num_warmup, 4, 1, 4, 1]
    assert len({seed for *_, seed in calls}) == len(calls)


def test_no_two_timed_calls_share_a_prompt(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [
        tuple(prompt)
        for seed in range(3)
        for count in (1, 2)
        for prompt in bench_decode.random_prompts(256, count, 16, seed)
    ]
    assert len(set(prompts)) == len(prompts) == 9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-steps", "0"], "--num-steps is 0, but must be at least 1"),
        (["--num-rounds", "0"], "--num-rounds is 0"),
        (["--num-warmup", "-1"], "--num-warmup is -1, but must be at least 0"),
        (["--output-len", "1"], "--output-len is 1, but must be at least 2"),
        (["--no-step"], "--no-step leaves nothing to time\nhint: add --end-to-end"),
        (["--contexts", "509"], "513 tokens, more than the model's context (512)"),
        (["--end-to-end", "--input-lens", "8,500"], "1012 tokens, more than --max-model-len (512)"),
        (["--end-to-end", "--output-len", "9", "--max-num-seqs", "2"], "--batch-sizes has 3, more than"),
        (["--json", "/no/such/place/x.json"], "/no/such/place/x.json cannot be written: No such file"),
    ],
)
def test_what_cannot_be_measured_is_refused_first(
    arguments: list[str], message: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(model, "--device", "cpu", *arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("text", ["", "1,,2", "0", "4,-1", "x"])
def test_lists_of_numbers_are_checked(text: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        bench(model, "--batch-sizes", text)
    assert caught.value.code == 2
    assert "invalid list of positive numbers" in capsys.readouterr().err


class Broken(DecodeWorkload):
    """Fails with three sequences."""

    error: BaseException = RuntimeError("out of order")

    def __init__(self, model: DecodeModel, batch_size: int, context: int, num_steps: int) -> None:
        if batch_size == 3:
            raise self.error
        super().__init__(model, batch_size, context, num_steps)


def test_a_line_that_fails_is_told_and_does_not_stop_the_others(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decode_workload, "DecodeWorkload", Broken)
    assert bench(model, "--batch-sizes", "1,3,2", "--contexts", "9", "--json", "-", "--device", "cpu") == 1
    report = report_of(capsys)
    assert [row["batch_size"] for row in report["rows"]] == [1, 2]
    assert report["failures"] == [
        {"measure": "step", "batch_size": "3", "context": "9", "error": "RuntimeError: out of order"}
    ]


def test_what_is_known_is_on_disk_when_the_run_is_cut_off(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_workload, "DecodeWorkload", Broken)
    monkeypatch.setattr(Broken, "error", KeyboardInterrupt())
    path = tmp_path / "report.json"
    assert bench(model, "--json", str(path), "--device", "cpu") == 130
    assert [row["batch_size"] for row in json.loads(path.read_text())["rows"]] == [1, 1]


def test_keys_and_values_that_do_not_fit_are_skipped(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # 3 sequences of 34 tokens with 2 x 2 x 32 values of 2 bytes take 26,112 bytes.
    monkeypatch.setattr(bench_decode, "free_memory_bytes", lambda device: 30_000)
    assert bench(model, "--json", "-", "--device", "cpu") == 0
    rows = report_of(capsys)["rows"]
    assert ["skipped" in row for row in rows] == [False, False, False, True]


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_advances_every_sequence_and_can_be_repeated(fused: bool, model: str) -> None:
    plan = plan_engine(
        EngineConfig(model=model, load_format="dummy", device="cpu", fused_cpu_decode=fused, dtype="float32")
    )
    weights = load_weights(plan.checkpoint, dtype=torch.float32, device="cpu")
    decode_model = DecodeModel(plan.checkpoint.spec, weights, plan.config, max_model_len=100)
    workload = DecodeWorkload(decode_model, batch_size=3, context=17, num_steps=4)
    ((name, make),) = workload.steps().items()
    step = make()
    assert name == ("fused" if fused else "operators")
    before = workload.cache.k.clone()
    runs = []
    for _ in range(2):
        workload.rewind()
        tokens = []
        for _ in range(4):
            step()
            tokens.append(workload.state.last_token.tolist())
        runs.append(tokens)
        assert workload.state.computed_len.tolist() == [20, 20, 20]
    assert runs[0] == runs[1]
    assert len({tuple(column) for column in zip(*runs[0], strict=True)}) == 3
    # Four new keys per sequence, layer and head; nothing else was touched.
    changed = (workload.cache.k != before).any(-1)
    assert changed.sum() == 3 * 4 * 2 * 2
    assert not changed[:, 0].any()


def test_the_read_limit_falls_back_to_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    from tiny_vllm.cli import machine
    from tiny_vllm.kernels.cuda import read_probe
    from tiny_vllm.kernels.cuda.errors import CudaKernelError

    def refuse(device: str) -> None:
        raise CudaKernelError("bulk copies need another GPU")

    monkeypatch.setattr(machine, "measure_read_bandwidth", lambda device: 5.0)
    monkeypatch.setattr(read_probe, "measure_read_rate", refuse)
    assert "all of torch's threads" in measure_read_limit("cpu").method
    limit = measure_read_limit("cuda")
    assert limit.bytes_per_second == 5.0
    assert limit.method == "sum of a buffer, some percent below the limit: bulk copies need another GPU"


def test_the_read_limit_of_a_gpu_names_every_window(monkeypatch: pytest.MonkeyPatch) -> None:
    from tiny_vllm.kernels.cuda import read_probe

    rate = read_probe.ReadRate(4.5e12, 4, 2_500_000_000, {3: 4.4e12, 4: 4.5e12})
    monkeypatch.setattr(read_probe, "measure_read_rate", lambda device: rate)
    limit = measure_read_limit("cuda")
    assert limit.bytes_per_second == 4.5e12 and limit.method == "bulk copies to shared memory"
    assert limit.details == {
        "48 KiB in flight per multiprocessor": 4.4e12,
        "64 KiB in flight per multiprocessor": 4.5e12,
    }


@pytest.mark.gpu
def test_a_gpu_times_the_chain_and_generate(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    generate = ("--end-to-end", "--input-lens", "5", "--output-len", "4", "--num-iters", "1")
    assert bench(model, "--device", "cuda", "--json", "-", "--max-num-seqs", "4", *generate) == 0
    report = report_of(capsys)
    # The tape has no kernel for so small a model, and says so once.
    tape, *steps = [row for row in report["rows"] if row["measure"] == "step"]
    assert tape["computed_by"] == "tape" and tape["skipped"]
    assert [(row["batch_size"], row["context"]) for row in steps if row["computed_by"] == "chain"] == [
        (1, 9), (1, 30), (3, 9), (3, 30),
    ]  # fmt: skip
    # A launch alone takes some microseconds; a tiny model's step takes far less than a millisecond.
    assert all(1 < row["us_per_step"] < 2000 for row in steps)
    assert len(report["rows"]) == 1 + len(steps) + 3
    assert report["machine"]["driver"]


@pytest.mark.gpu
def test_a_gpu_times_the_tape_where_there_is_one(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0 or newer")
    larger = {"hidden_size": 1024, "intermediate_size": 2048, "vocab_size": 4096, "num_key_value_heads": 8}
    shape = {**CONFIG, **larger, "num_attention_heads": 16}
    (Path(model) / "config.json").write_text(json.dumps(shape))
    assert bench(model, "--device", "cuda", "--json", "-", "--batch-sizes", "1,3,16") == 0
    rows = report_of(capsys)["rows"]
    by_tape = [(row["batch_size"], row["context"]) for row in rows if row["computed_by"] == "tape"]
    assert by_tape == [(1, 9), (1, 30), (3, 9), (3, 30)]
