"""What does a token cost through `LLM.generate` on a GPU, by batch?

    PYTHONPATH=. python3 benchmarks/gpu_generate.py [--json FILE]

Llama-3.2-1B's shape in BF16, seeded random weights, greedy, prompts of 128 random tokens. A step is the time
of the whole call less that of a call for one token, over the remaining tokens. Ends with 64 prompts of 2048.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

from benchmarks.gpu_timing import Report
from tiny_vllm import LLM, SamplingParams

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
BATCHES = (1, 2, 4, 8, 16, 64, 256)
PROMPT_LEN = 128


def timed(llm: LLM, prompts: list[list[int]], new_tokens: int) -> float:
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report = Report(args.json)
    rng = random.Random(0)

    def prompts(count: int, length: int) -> list[list[int]]:
        return [[rng.randrange(100, 100_000) for _ in range(length)] for _ in range(count)]

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(CONFIG))
        start = time.perf_counter()
        with LLM(str(path), load_format="dummy", max_model_len=8192) as llm:
            report.add(ready_after_s=time.perf_counter() - start)
            for batch in BATCHES:
                new_tokens = 512 if batch < 64 else 256
                timed(llm, prompts(batch, PROMPT_LEN), 3)
                one = timed(llm, prompts(batch, PROMPT_LEN), 1)
                whole = timed(llm, prompts(batch, PROMPT_LEN), new_tokens)
                report.add(
                    batch=batch,
                    us_per_step=(whole - one) / (new_tokens - 1) * 1e6,
                    tokens_per_s=batch * new_tokens / whole,
                )
            for _ in range(2):
                report.add(prefill_tokens_per_s=64 * 2048 / timed(llm, prompts(64, 2048), 1))
    report.write()


if __name__ == "__main__":
    main()
