"""Which stored tensor is which weight: complete, without doubles, and of the right shapes, or refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tiny_vllm.errors import ModelError, printable
from tiny_vllm.models.spec import ModelSpec
from tiny_vllm.weights.names import DERIVED, GGUF_LAYER, OTHER_PARTS, name_table, text_name
from tiny_vllm.weights.shapes import expected_shapes, stored_forms

NAMES_SHOWN = 6


def match_tensors(spec: ModelSpec, stored: Mapping[str, tuple[int, ...]], *, where: str) -> dict[str, str]:
    """Canonical name -> stored name of every tensor to load.

    stored: name -> shape in the files. where: the file or directory, for messages. A head stored beside a
    tied configuration (see `tied_head`), tables computable from it, and what a multimodal model has beside
    its text part are left out; any other tensor the spec has no place for would change the output, so it is
    refused, as are missing ones and wrong shapes. Raises ModelError.
    """
    forms = stored_forms(spec)
    is_gguf = any(GGUF_LAYER.fullmatch(name) for name in stored)
    table = name_table(spec.family, gguf=is_gguf)
    ignored = [DERIVED]
    if any(text_name(name) != name for name in stored):
        ignored.append(OTHER_PARTS)
    found: dict[str, str] = {}
    brought: dict[str, str] = {}
    unexpected = []
    for name in stored:
        part = table.canonical(text_name(name))
        if part in forms:
            assert part is not None
            for atom in forms[part].atoms:
                if atom in brought:
                    raise ModelError(
                        f"{where}: {printable(brought[atom])} and {printable(name)} are the same weight",
                        hint="remove one of them, or download the model again",
                    )
                brought[atom] = name
            found[part] = name
        elif part == "lm_head" and spec.tie_word_embeddings:
            continue
        elif not any(pattern.fullmatch(name) for pattern in ignored):
            unexpected.append(name)
    missing = []
    for part in expected_shapes(spec):
        atoms = forms[part].atoms
        absent = [atom for atom in atoms if atom not in brought]
        if is_gguf and atoms != (part,) and len(absent) == len(atoms):
            missing.append(table.stored(part, holds_experts=True))
        else:
            missing += map(table.stored, absent)
    if missing:
        hint = "the checkpoint is incomplete, or its configuration is another model's: download both again"
        if missing == [table.stored("lm_head")]:
            hint = "tie_word_embeddings is false, so the head must be stored"
        raise ModelError(f"{where}: missing {_listed(missing)}", hint=hint)
    if unexpected:
        raise ModelError(
            f"{where}: unexpected {_listed(unexpected)}",
            hint="the configuration has no place for them; take the one that came with these weights",
        )
    for part, form in forms.items():
        if part in found and tuple(stored[found[part]]) != form.shape:
            raise ModelError(
                f"{where}: tensor {printable(found[part])} has shape {list(stored[found[part]])}, "
                f"but the configuration needs {list(form.shape)}",
                hint="weights and configuration are of different models or versions; download both again",
            )
    return found


def tied_head(spec: ModelSpec, stored: Iterable[str]) -> str | None:
    """The stored name of a Hugging Face model's head that the configuration says is the embedding."""
    if not spec.tie_word_embeddings:
        return None
    table = name_table(spec.family, gguf=False)
    return next((name for name in stored if table.canonical(text_name(name)) == "lm_head"), None)


def _listed(names: Iterable[str]) -> str:
    """ "tensor a", or "8 tensors: a, b, ..." with the first few named."""
    names = list(names)
    shown = [printable(name) for name in names[:NAMES_SHOWN]]
    if len(names) == 1:
        return f"tensor {shown[0]}"
    more = ", ..." if len(names) > NAMES_SHOWN else ""
    return f"{len(names)} tensors: {', '.join(shown)}{more}"
