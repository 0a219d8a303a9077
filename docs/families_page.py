"""Writes docs/reference/families.md from the tables that the program itself reads.

python -m docs.families_page
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from docs.family_differences import RECORD
from tests.helpers.tiny_families import CASES
from tests.models.test_family_devices import PROMPT_LEN as GPU_PROMPT_LEN
from tests.models.test_family_devices import TOLERANCE_FP32 as GPU_TOLERANCE
from tests.weights.test_family_logits import NOT_IN_GGUF, NUM_TOKENS, PROMPT_LEN, TOLERANCE
from tiny_vllm.models.families import FAMILIES, Family, windows_everywhere
from tiny_vllm.models.hf_config import spec_from_hf_config
from tiny_vllm.models.spec import RopeScaling
from tiny_vllm.weights.gguf_file import PLAIN_DTYPES, QUANTISED_TYPES
from tiny_vllm.weights.safetensors_file import DTYPE_NAMES

MEASURED: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
PAGE = Path(__file__).parent / "reference" / "families.md"

INTRODUCTION = """\
# Model families

Written by `python -m docs.families_page` from `tiny_vllm/models/families.py`; a test keeps it current.

A model is recognised by `architectures` (or `model_type`) of its config.json, or by `general.architecture` of
its GGUF file. Anything else is refused with this list; so is a value that would change the output and is not
understood. `tiny-vllm info MODEL` prints what was understood, or why it is refused, without loading weights.
"""

PATHS = """\
**Steps.** Every family decodes by one chain of kernels, captured as a CUDA graph, on a GPU. On a CPU *fused*
families decode by one compiled function, and the others through `models/decoder.py` operator by operator. A
window as long as the model's context is no window; one as long as `max_model_len` hides nothing, but on a CPU
its model goes by operator all the same.

**Pages.** Where every layer has a window (Mistral 7B v0.1, Mixtral with one, Phi-3 mini), pages that slid out
of it go back to the pool, so a sequence holds the pages of its window however long it gets.
"""

LONG_ROPE = """\
`dynamic` and `longrope` depend on the longest length in use. Here that is `max_model_len`, for every request,
so that cached keys stay valid; by default it is the original length, and a longer one must be asked for.
`rope_scaling` and `rope_parameters` are both read. Any other kind is refused.
"""

CHECKS = f"""\
Each case is a tiny random model of transformers, in FP32, with a prompt of {PROMPT_LEN} tokens, longer than
its window and, where one is stated, than the length its RoPE is scaled from.

- *logits*: of the prompt and {NUM_TOKENS} greedy tokens, within {TOLERANCE:g} of transformers, tokens equal.
  The table has the largest difference that was measured, and the largest logit beside it.
- *schedules*: ragged batch, prompts in chunks of 13 tokens, prefix hit, preemption, n = 2: tokens equal.
- *GGUF*: the same logits from a GGUF file of the model, where the format can describe it.

The table is of a CPU. On a GPU `make gpu-test` holds every case to what a CPU computes: prompts of
{GPU_PROMPT_LEN} tokens in FP32 within {GPU_TOLERANCE:g}, in BF16 within 1.2 times the CPU's own error in BF16
(`tests/models/test_family_devices.py`), decode steps by the chain of kernels in FP32 within the same,
relative to the largest logit (`tests/kernels/gpu/test_chain_families.py`).

Real weights: SmolLM2-135M (bundled) and Gemma 3 270M (Q4_K_M) give the greedy text of transformers from the
same dequantised weights, and the token ids of llama.cpp (100 texts) and tiktoken (205) and of SentencePiece
(304); 24 of each have control tokens that are to stay plain text.

`python -m docs.family_differences` has measured the differences ({MEASURED["processor"]}, torch
{MEASURED["torch"]}, transformers {MEASURED["transformers"]}); `make test` holds them to the tolerance.
"""


def differences(family: Family) -> Iterator[str]:
    """What the family has beyond a Llama without biases, in words."""
    traits, numbers = family.traits, family.numbers
    if traits.get("qkv_bias"):
        yield "biases of Q, K and V"
    elif family.flags:
        yield f"biases if {' or '.join(f'`{key}`' for key in dict.fromkeys(family.flags.values()))}"
    if "qk_norm" in traits:
        yield f"norms of Q and K, {'per head' if traits['qk_norm'] == 'head' else 'over all heads'}"
    if traits.get("norm_placement") == "both":
        yield "norms before and after attention and MLP"
    if traits.get("norm_placement") == "output":
        yield "norms after attention and MLP, not before"
    if traits.get("norm_offset"):
        yield "norm weights are offsets from 1"
    if traits.get("activation") == "gelu_tanh":
        yield "GELU"
    if traits.get("activation") == "clamped_swiglu":
        yield "clamped SwiGLU"
    if family.windows:
        yield "sliding windows"
    if family.sliding_theta:
        yield "a RoPE of their own for sliding layers"
    if family.has_partial_rope:
        yield "partly rotated heads"
    if family.has_unrotated_layers:
        yield "layers without RoPE"
    if "attention_softcap" in numbers:
        yield "soft caps of scores and logits"
    elif "logit_softcap" in numbers:
        yield "soft cap of logits"
    if traits.get("attention_sinks"):
        yield "attention sinks"
    if "attention_scale" in numbers or family.query_scalar_key:
        yield "a scale of attention"
    if "residual_multiplier" in numbers:
        yield "multipliers of embedding, residual stream and logits"
    if family.scales_embedding:
        yield "scaled embedding"
    if family.experts:
        yield "mixture of experts"


def step(family: Family) -> str:
    config: dict[str, Any] = {"architectures": list(family.architectures)}
    if family.windows is windows_everywhere:
        config["sliding_window"] = None
    if not spec_from_hf_config(config).fits_fused_cpu_decode:
        return "by operator"
    return "fused, by operator with windows" if family.windows else "fused"


def cases_of(family: Family) -> list[str]:
    architecture = family.architectures[0].removesuffix("ForCausalLM")
    return [name for name, (prefix, _) in CASES.items() if prefix.removesuffix("Text") == architecture]


def table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def family_rows() -> Iterator[tuple[str, ...]]:
    for family in FAMILIES:
        names = " ".join(f"`{name}`" for name in (*family.architectures, *family.wrappers))
        yield family.models, names, f"`{family.gguf}`", "; ".join(differences(family)), step(family)


def check_rows() -> Iterator[tuple[str, ...]]:
    for family in FAMILIES:
        for case in cases_of(family):
            numbers = MEASURED["cases"][case]
            logits = f"{numbers['largest_difference']:.1e} of {numbers['largest_logit']:.1f}"
            yield family.name, case, logits, "yes", "not expressible" if case in NOT_IN_GGUF else "yes"


def render() -> str:
    parts = [
        INTRODUCTION,
        table(("models", "config.json", "GGUF", "beyond Llama", "steps on a CPU"), family_rows()),
        PATHS,
        "Of a multimodal model (`...ForConditionalGeneration`) the text part alone is loaded.\n",
        "## RoPE\n",
        ", ".join(f"`{kind}`" for kind in get_args(RopeScaling))
        + ", each over whole heads or, where the family has it, over their first part.\n",
        LONG_ROPE,
        "## Formats\n",
        f"safetensors ({', '.join(DTYPE_NAMES)}), one file or several with an index; "
        f"GGUF 2 and 3 ({', '.join((*PLAIN_DTYPES, *QUANTISED_TYPES))}).\n",
        "## What was checked\n",
        CHECKS,
        table(("family", "case", "logits", "schedules", "GGUF"), check_rows()),
    ]
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
