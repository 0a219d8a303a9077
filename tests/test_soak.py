"""Random load on the whole engine: whatever runs beside a request, it gets the tokens of its solo run.

Arrivals in bursts, shared prefixes, several choices, three priorities, aborts, and a pool too small for all
slots, so that running sequences are preempted; both prefill policies, with and without planning ahead.
Everything is drawn from fixed seeds.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tiny_vllm import LLM, EngineConfig, SamplingParams
from tiny_vllm.config import PrefillPolicy
from tiny_vllm.engine.build import build_engine, plan_engine
from tiny_vllm.engine.engine import Engine
from tiny_vllm.types import FinishReason, Request

PAGE_SIZE = 16
VOCAB_SIZE = 384
EOS_ID = 2
LONGEST_PROMPT, LONGEST_OUTPUT = 120, 60
MARGIN = 1e-4
"""Of logits that are a few units apart. FP32 sums in another order differ by some 1e-6: where the two most
likely tokens are closer than this, either may be right, so such requests are not drawn."""


@dataclass(frozen=True)
class Scale:
    """head_dim: 64 where GPU kernels compute it. num_waves: the engine is idle between two of them.
    num_pages: enough for the prompts of all slots, some of which share pages, and not for all they generate.
    """

    device: str
    num_slots: int
    head_dim: int
    num_pages: int
    num_requests: int
    num_waves: int


CPU = Scale("cpu", num_slots=64, head_dim=16, num_pages=250, num_requests=330, num_waves=3)
# The same requests, as many at once as there are slots by default on a GPU.
WIDE = Scale("cpu", num_slots=256, head_dim=16, num_pages=660, num_requests=330, num_waves=1)
GPU = Scale("cuda", num_slots=256, head_dim=64, num_pages=1250, num_requests=1200, num_waves=2)


@dataclass(frozen=True)
class Work:
    """solo: the tokens of the request when it runs alone."""

    prompt: tuple[int, ...]
    max_tokens: int
    num_choices: int
    priority: int
    stop_token_ids: tuple[int, ...]
    solo: tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """is_bounded: whether prompts may delay decodes only for so long."""

    policy: PrefillPolicy
    is_ahead: bool
    is_bounded: bool

    def __str__(self) -> str:
        return self.policy + ", ahead" * self.is_ahead + ", bounded" * self.is_bounded


def write_model(folder: Path, head_dim: int) -> str:
    """A random Llama in FP32 whose next token depends on the whole context: weights are spread so that every
    layer changes what it adds to."""
    num_heads, num_kv_heads, num_layers = 4, 2, 2
    hidden, inner = num_heads * head_dim, 6 * head_dim
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": EOS_ID,
    }
    generator = torch.Generator().manual_seed(0)

    def random_tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 1.6 / hidden**0.5

    tensors = {"model.embed_tokens.weight": random_tensor(VOCAB_SIZE, hidden)}
    for layer in range(num_layers):
        shapes = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (num_kv_heads * head_dim, hidden),
            "self_attn.v_proj": (num_kv_heads * head_dim, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        for name, shape in shapes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = random_tensor(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = 1 + random_tensor(hidden)
    tensors["model.norm.weight"] = 1 + random_tensor(hidden)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def draw_work(path: str, scale: Scale) -> list[Work]:
    """Requests with their solo runs: one at a time, without prefix cache, planning ahead or fused steps."""
    rng = random.Random(scale.num_requests)
    prefixes = [random_tokens(rng, LONGEST_PROMPT) for _ in range(8)]
    work: list[Work] = []
    with LLM(
        path,
        device=scale.device,
        dtype="float32",
        max_num_seqs=1,
        num_pages=16,
        enable_prefix_caching=False,
        async_scheduling=False,
        enforce_eager=scale.device == "cuda",
        fused_cpu_decode=False,
    ) as llm:
        while len(work) < scale.num_requests:
            shared = rng.choice(prefixes)[: rng.choice([0, rng.randrange(LONGEST_PROMPT - 8)])]
            prompt = shared + random_tokens(rng, rng.randrange(1, 9))
            max_tokens = rng.randrange(1, LONGEST_OUTPUT)
            stops = tuple(rng.sample(range(VOCAB_SIZE), rng.choice([0, 0, 12])))
            params = SamplingParams(
                temperature=0, max_tokens=max_tokens, stop_token_ids=stops, logprobs=2, detokenize=False
            )
            (choice,) = llm.generate(list(prompt), params, use_tqdm=False)[0].outputs
            if all(margin(position) > MARGIN for position in choice.logprobs or ()):
                num_choices, priority = rng.choice([1, 1, 1, 2]), rng.randrange(3)
                work.append(Work(prompt, max_tokens, num_choices, priority, stops, tuple(choice.token_ids)))
    return work


def margin(position: dict[int, Any]) -> float:
    first, second = sorted((entry.logprob for entry in position.values()), reverse=True)[:2]
    return float(first - second)


def random_tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(count))


class Soak:
    """An engine under random load, and what it has said so far."""

    def __init__(self, engine: Engine, work: list[Work], seed: int) -> None:
        self.engine = engine
        self.rng = random.Random(seed)
        self.work = work
        self.tokens: dict[tuple[str, int], list[int]] = {
            (str(number), index): [] for number, item in enumerate(work) for index in range(item.num_choices)
        }
        self.reasons: dict[tuple[str, int], FinishReason] = {}
        self.aborted: set[str] = set()
        self.most_running = 0

    def run_wave(self, numbers: range) -> None:
        """Add these requests in bursts, abort one in a while, and run until the engine is idle."""
        rng, engine = self.rng, self.engine
        pending = list(numbers)
        while pending or engine.has_work:
            if rng.random() < 0.3:
                for _ in range(rng.randrange(1, len(numbers) // 4)):
                    if pending:
                        self.add(pending.pop(0))
            if rng.random() < 0.1:
                name = str(rng.choice(numbers))
                self.aborted.add(name)
                engine.abort(name)  # without effect before it came and after it has ended
            for event in engine.step():
                key = (event.request_id, event.index)
                assert key not in self.reasons, "an event after the last one"
                if event.token_id is not None:
                    self.tokens[key].append(event.token_id)
                if event.finish_reason is not None:
                    self.reasons[key] = event.finish_reason
            self.most_running = max(self.most_running, engine.scheduler.num_running)
            if rng.random() < 0.05:
                engine.scheduler.check()
        engine.scheduler.check()
        stats = engine.stats()
        assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages

    def add(self, number: int) -> None:
        item = self.work[number]
        params = SamplingParams(
            temperature=0,
            max_tokens=item.max_tokens,
            stop_token_ids=item.stop_token_ids,
            n=item.num_choices,
        )
        self.engine.add(Request(str(number), item.prompt, params, self.engine.clock(), item.priority))

    def assert_all_as_alone(self) -> None:
        """One end for every choice, with the tokens of the solo run, or if aborted the first of them."""
        assert self.reasons.keys() == self.tokens.keys()
        for (name, index), tokens in self.tokens.items():
            solo = self.work[int(name)].solo
            if self.reasons[name, index] is FinishReason.ABORT:
                assert name in self.aborted
                solo = solo[: len(tokens)]
            assert tuple(tokens) == solo, f"choice {index} of request {name} differs from its solo run"


def soak(path: str, work: list[Work], scale: Scale, case: Case) -> None:
    config = EngineConfig(
        model=path,
        device=scale.device,
        dtype="float32",
        page_size=PAGE_SIZE,
        max_num_seqs=scale.num_slots,
        num_pages=scale.num_pages,
        max_num_batched_tokens=2 * scale.num_slots,
        prefill_policy=case.policy,
        async_scheduling=case.is_ahead,
        max_prefill_tokens_per_decode=scale.num_slots * 3 // 4 if case.is_bounded else None,
    )
    soak = Soak(build_engine(plan_engine(config)), work, seed=1)
    size = len(work) // scale.num_waves
    for wave in range(scale.num_waves):
        soak.run_wave(range(wave * size, (wave + 1) * size))
    soak.assert_all_as_alone()
    stats = soak.engine.stats()
    print(f"{case}: {soak.most_running} together, {stats}, {len(soak.aborted)} aborted")
    # What the load is meant to bring about has come about.
    assert soak.most_running > scale.num_slots * 9 // 10
    assert stats.num_preemptions > scale.num_slots // 8
    assert stats.prefix_hit_tokens > stats.prefix_query_tokens // 10
    assert FinishReason.ABORT in soak.reasons.values()
    assert FinishReason.STOP in soak.reasons.values()


POLICIES: tuple[tuple[PrefillPolicy, bool], ...] = (
    ("mixed", False),
    ("exclusive", False),
    ("exclusive", True),
)
CASES = [Case(policy, is_ahead, is_bounded) for policy, is_bounded in POLICIES for is_ahead in (False, True)]
cases = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.fixture(scope="module")
def cpu_work(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Work]]:
    path = write_model(tmp_path_factory.mktemp("cpu"), CPU.head_dim)
    return path, draw_work(path, CPU)


@pytest.fixture(scope="module")
def gpu_work(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Work]]:
    path = write_model(tmp_path_factory.mktemp("gpu"), GPU.head_dim)
    return path, draw_work(path, GPU)


@pytest.mark.slow
def test_a_solo_run_depends_on_all_of_its_context(cpu_work: tuple[str, list[Work]]) -> None:
    """Without this, equal tokens would say little about the pages they were computed from."""
    path, work = cpu_work
    long = [item for item in work if len(item.prompt) > 40 and len(item.solo) > 8][:10]
    with LLM(path, dtype="float32", max_num_seqs=1, num_pages=16, fused_cpu_decode=False) as llm:
        for item in long:
            changed = [3 if item.prompt[0] != 3 else 4, *item.prompt[1:]]
            params = SamplingParams(
                temperature=0,
                max_tokens=item.max_tokens,
                stop_token_ids=item.stop_token_ids,
                detokenize=False,
            )
            (choice,) = llm.generate(changed, params, use_tqdm=False)[0].outputs
            assert tuple(choice.token_ids) != item.solo
    assert len(long) == 10


@pytest.mark.slow
@cases
def test_everybody_gets_the_tokens_of_the_solo_run(case: Case, cpu_work: tuple[str, list[Work]]) -> None:
    soak(*cpu_work, CPU, case)


@pytest.mark.slow
def test_everybody_gets_the_tokens_of_the_solo_run_beside_250(cpu_work: tuple[str, list[Work]]) -> None:
    soak(*cpu_work, WIDE, Case("exclusive", is_ahead=True, is_bounded=False))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@cases
def test_everybody_gets_the_tokens_of_the_solo_run_on_a_gpu(
    case: Case, gpu_work: tuple[str, list[Work]]
) -> None:
    soak(*gpu_work, GPU, case)
