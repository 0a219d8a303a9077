"""From what a user names as the model to an opened, complete checkpoint.

Opening reads configuration and headers, never tensor data, and refuses everything that loading would stumble
over, so that nothing is allocated for a checkpoint that cannot be used.

The type rule (`spec.dtype`): the type the matrices are stored in, whatever the configuration declares, so
that nothing is narrowed silently; float32 if they differ; bfloat16 for quantised GGUF files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiny_vllm.config import Choice, GenerationConfig
from tiny_vllm.errors import MAX_PATH_LEN, ConfigError, ModelError, printable, shown
from tiny_vllm.models.hf_config import spec_from_hf_config
from tiny_vllm.models.spec import ModelSpec
from tiny_vllm.weights.bundled import bundled_model_path
from tiny_vllm.weights.generation_config import describe_defaults, sampling_defaults
from tiny_vllm.weights.gguf_file import GGUFFile
from tiny_vllm.weights.hf_directory import (
    CONFIG,
    GENERATION_CONFIG,
    read_json,
    token_ids,
    tokenizer_token_ids,
    weight_files,
)
from tiny_vllm.weights.hub import fetch_model, is_hub_id
from tiny_vllm.weights.match import match_tensors, tied_head
from tiny_vllm.weights.safetensors_file import SafetensorsFiles
from tiny_vllm.weights.tensor_source import TensorSource

if TYPE_CHECKING:
    from tiny_vllm.text.tokenizer import Tokenizer

BUNDLED_NAME = "SmolLM2-135M-Instruct"
FORMATS = ("auto", "safetensors", "gguf", "dummy")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model that can be loaded.

    name: short name for display. eos_token_ids: every token that ends a text, from all files of the model.
    source, tensor_names: where the weights are, and canonical name -> stored name of each; source is None for
    dummy weights. tied_head: stored name of a head that must be the embedding. tokenizer: directory,
    tokenizer.json or opened GGUF file; None if there is none. generation_config: the file of that name; None
    if there is none, as for GGUF.
    """

    name: str
    spec: ModelSpec
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    source: TensorSource | None
    tensor_names: Mapping[str, str] = field(repr=False)
    tied_head: str | None = None
    tokenizer: Path | GGUFFile | None
    generation_config: Path | None = None

    @property
    def can_end(self) -> bool:
        """Whether the model has a token that ends a text."""
        return any(self._has(token_id) for token_id in self.eos_token_ids)

    @property
    def eos_remark(self) -> str | None:
        """Which of eos_token_ids the model does not have: published checkpoints name such ones where the
        embedding was not resized. They are harmless unless no other ends a text."""
        beyond = [token_id for token_id in self.eos_token_ids if not self._has(token_id)]
        if not beyond:
            return None
        verb, pronoun = ("is", "it") if len(beyond) == 1 else ("are", "them")
        remark = (
            f"{printable(', '.join(map(str, beyond)))} {verb} beyond the model's ids "
            f"(0 to {self.spec.vocab_size - 1}), so no text ends with {pronoun}"
        )
        return remark if self.can_end else f"{remark}: only max_tokens and a request's own stops end one"

    def _has(self, token_id: int) -> bool:
        return 0 <= token_id < self.spec.vocab_size

    def sampling_defaults(self, asked: GenerationConfig) -> Mapping[str, Any]:
        """Values for the sampling parameters that a request leaves out. Raises ModelError."""
        if asked == "none" or self.generation_config is None:
            return {}
        return sampling_defaults(self.generation_config)

    def choose_sampling_defaults(self, asked: GenerationConfig) -> Choice:
        """What `sampling_defaults` takes, for the log and for `info`. Raises ModelError."""
        defaults = self.sampling_defaults(asked)
        if asked == "none":
            reason = "as asked: what requests leave out has OpenAI's defaults"
        elif defaults:
            assert self.generation_config is not None
            reason = describe_defaults(defaults, self.generation_config)
        else:
            reason = f"the model recommends nothing in a {GENERATION_CONFIG}: OpenAI's defaults"
        return Choice("generation_config", asked, reason)

    def load_tokenizer(self) -> Tokenizer:
        """Raises ModelError if the model has no tokenizer."""
        from tiny_vllm.text.gguf_tokenizer import tokenizer_from_gguf
        from tiny_vllm.text.tokenizer_directory import load_tokenizer_directory

        if self.tokenizer is None:
            raise ModelError(f"{self.name} has no tokenizer", hint="pass tokenizer=")
        if isinstance(self.tokenizer, GGUFFile):
            vocabulary = self.tokenizer.vocabulary()
            try:
                return tokenizer_from_gguf(vocabulary)
            except ModelError as error:
                raise ModelError(f"{self.tokenizer.path}: {error.message}", hint=error.hint) from error
        return load_tokenizer_directory(self.tokenizer)


def open_checkpoint(
    model: str | None, *, load_format: str = "auto", tokenizer: str | None = None, has_text: bool = True
) -> Checkpoint:
    """Find and check a model.

    model: a directory (safetensors, or one .gguf file), a .gguf file, a hub id, or None for the bundled
    model; with load_format "dummy" also a config.json, and no weights are needed.
    tokenizer: directory, tokenizer.json, .gguf file or hub id to use instead of the model's own.
    has_text: read which tokens begin and end a text; without, a model can be looked at whose files about that
    are damaged.
    Raises ModelError for anything missing, damaged or unsupported, ConfigError for an unknown load_format.
    """
    if load_format not in FORMATS:
        raise ConfigError(
            f"load_format is {shown(load_format)}, but must be one of {', '.join(FORMATS)}",
            hint="leave it out: the files tell it",
        )
    path = bundled_model_path() if model is None else _resolve("model", model, weights=load_format != "dummy")
    gguf = _gguf_path(path)
    if gguf is not None and load_format == "safetensors":
        raise ModelError(
            f"{gguf} is a GGUF file, but load_format is 'safetensors'", hint="leave load_format out"
        )
    if gguf is None and load_format == "gguf":
        raise ModelError(
            f"{path} holds no GGUF file, but load_format is 'gguf'", hint="leave load_format out"
        )
    if gguf is not None:
        checkpoint = _open_gguf(gguf, dummy=load_format == "dummy")
    else:
        checkpoint = _open_directory(path, dummy=load_format == "dummy", has_text=has_text)
    if model is None:
        checkpoint = replace(checkpoint, name=BUNDLED_NAME)
    elif not Path(model).expanduser().exists():
        checkpoint = replace(checkpoint, name=model)  # fetched: its local name is a hash
    return checkpoint if tokenizer is None else _with_tokenizer(checkpoint, tokenizer, has_text=has_text)


def _resolve(what: str, name: str, *, weights: bool) -> Path:
    """An existing path, fetched from the hub if the name is none. what: "model" or "tokenizer"."""
    if not name:
        raise ModelError(f"the name of the {what} is empty", hint=f"name a path or leave {what} out")
    given = shown(name, MAX_PATH_LEN)
    try:
        path = Path(name).expanduser()
        if path.exists():
            return path
    except (OSError, RuntimeError) as error:  # RuntimeError: the home directory of ~ is not known
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelError(f"{what} {given} cannot be opened: {reason}", hint="check the path") from None
    if not is_hub_id(name):
        raise ModelError(f"there is no {what} at {given}", hint="check the path")
    return fetch_model(name, weights=weights)


def _gguf_path(path: Path) -> Path | None:
    """The GGUF file meant by a path: itself, or the only one in a directory without safetensors files."""
    if path.is_file():
        return None if path.suffix == ".json" else path
    files = sorted(path.glob("*.gguf"))
    if not files or any(path.glob("*.safetensors*")):
        return None
    if len(files) > 1:
        raise ModelError(
            f"{path} holds {len(files)} GGUF files ({', '.join(printable(file.name) for file in files[:6])})",
            hint="name the one to use",
        )
    return files[0]


def _open_gguf(path: Path, *, dummy: bool) -> Checkpoint:
    if path.suffix == ".safetensors":
        raise ModelError(
            f"{path} is a single weight file", hint="name the directory that holds its config.json"
        )
    file = GGUFFile(path)
    names = match_tensors(file.spec, file.shapes, where=str(path))
    return Checkpoint(
        name=path.stem,
        spec=file.spec,
        eos_token_ids=file.eos_token_ids,
        bos_token_id=file.bos_token_id,
        source=None if dummy else file,
        tensor_names={} if dummy else names,
        tokenizer=file,
    )


def _open_directory(path: Path, *, dummy: bool, has_text: bool) -> Checkpoint:
    if path.is_file() and not dummy:
        raise ModelError(f"{path} is not a model", hint="name its directory, or use load_format='dummy'")
    directory = path.parent if path.is_file() else path
    config_path = path if path.is_file() else directory / CONFIG
    if not config_path.is_file():
        raise ModelError(
            f"{directory} has no {CONFIG}", hint="name a directory with a model, or a .gguf file"
        )
    config = read_json(config_path)
    try:
        spec = spec_from_hf_config(config)
    except ModelError as error:
        raise ModelError(f"{config_path}: {error.message}", hint=error.hint) from error
    source = None
    names: Mapping[str, str] = {}
    head = None
    if not dummy:
        files, weight_map = weight_files(directory)
        source = SafetensorsFiles(files, weight_map)
        names = match_tensors(spec, source.shapes, where=str(directory))
        head = tied_head(spec, source.shapes)
        spec = replace(spec, dtype=source.dtype(names))
    bos = [token for token in token_ids(directory, config, "bos") if token >= 0] if has_text else []
    generation_config = directory / GENERATION_CONFIG
    has_tokenizer = any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))
    return Checkpoint(
        name=directory.resolve().name,
        spec=spec,
        eos_token_ids=token_ids(directory, config, "eos") if has_text else (),
        bos_token_id=bos[0] if bos else None,
        source=source,
        tensor_names=names,
        tied_head=head,
        tokenizer=directory if has_tokenizer else None,
        generation_config=generation_config if generation_config.is_file() else None,
    )


def _with_tokenizer(checkpoint: Checkpoint, tokenizer: str, *, has_text: bool) -> Checkpoint:
    """Use another tokenizer; its end-of-sequence tokens join the model's."""
    path = _resolve("tokenizer", tokenizer, weights=False)
    gguf = _gguf_path(path)
    if gguf is not None:
        file = GGUFFile(gguf)
        return _joined(checkpoint, file, file.eos_token_ids)
    directory = path.parent if path.is_file() else path
    return _joined(checkpoint, path, tokenizer_token_ids(directory, "eos") if has_text else ())


def _joined(checkpoint: Checkpoint, tokenizer: Path | GGUFFile, eos: tuple[int, ...]) -> Checkpoint:
    united = tuple(dict.fromkeys((*checkpoint.eos_token_ids, *eos)))
    return replace(checkpoint, tokenizer=tokenizer, eos_token_ids=united)
