"""What may import what, and other rules about the shape of the package that no tool checks."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tiny_vllm"

# From top to bottom. A part imports itself and what stands below it; parts of one line stay apart.
LAYERS = (
    ("__main__",),
    ("cli",),
    ("__init__",),
    ("llm", "serving"),
    ("engine",),
    ("weights",),
    ("models",),
    ("quant",),
    ("kernels", "parallel", "text"),
    ("outputs",),
    ("config",),
    ("types",),
    ("errors",),
)
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}

PLANNING = ("sequence", "waiting", "page_pool", "prefix_cache", "scheduler", "plan")
HEAVY = (
    *("torch", "transformers", "gguf", "huggingface_hub", "rich", "tokenizers"),
    *("fastapi", "uvicorn", "zmq", "msgspec", "prometheus_client", "pydantic"),
)
PUBLIC_NAMES = {
    "LLM",
    "SamplingParams",
    "EngineConfig",
    "RequestOutput",
    "CompletionOutput",
    "TinyVLLMError",
    "ConfigError",
    "ModelError",
    "RequestError",
    "CapacityError",
    "EngineDead",
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in SOURCES.items()}


def imported_modules(module: str) -> Iterator[str]:
    """Every module named by an import statement of `module`, those inside functions included."""
    package = module if SOURCES[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                yield submodule if submodule in SOURCES else base


def part_of(module: str) -> str:
    """The layer a module belongs to: the first name below the package."""
    names = module.split(".")
    return names[1] if len(names) > 1 else "__init__"


def test_the_package_is_found() -> None:
    assert {"tiny_vllm", "tiny_vllm.types", "tiny_vllm.errors"} <= SOURCES.keys()


@pytest.mark.parametrize("module", SOURCES)
def test_imports_go_downward_only(module: str) -> None:
    part = part_of(module)
    assert part in LEVEL, f"{part} is new: give it a place in LAYERS and in ARCHITECTURE.md"
    for imported in imported_modules(module):
        if imported.partition(".")[0] != "tiny_vllm":
            continue
        other = part_of(imported)
        assert other == part or LEVEL[other] > LEVEL[part], f"{module} must not import {imported}"


def planning_modules() -> list[str]:
    return [f"tiny_vllm.engine.{name}" for name in PLANNING if f"tiny_vllm.engine.{name}" in SOURCES]


@pytest.mark.parametrize("module", planning_modules())
def test_planning_never_reaches_torch(module: str) -> None:
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        current = waiting.pop()
        for imported in imported_modules(current):
            assert imported.partition(".")[0] != "torch", f"{module} reaches torch through {current}"
            if imported in SOURCES and imported not in seen:
                seen.add(imported)
                waiting.append(imported)


@pytest.mark.parametrize("module", [*planning_modules(), "tiny_vllm", "tiny_vllm.cli.main"])
def test_importing_stays_light(module: str) -> None:
    """In a fresh interpreter: what an import really loads, package __init__ files included."""
    code = f"import sys, {module}; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.split() == []


MUTABLE_CALLS = {"list", "dict", "set", "defaultdict", "deque", "Counter", "OrderedDict", "bytearray"}
MUTATING_METHODS = {
    *("append", "add", "update", "extend", "insert", "setdefault"),
    *("pop", "popitem", "popleft", "appendleft", "remove", "discard", "clear"),
}


def is_mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id in MUTABLE_CALLS
    return isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)


def module_level_containers(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and is_mutable(node.value):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and is_mutable(node.value) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names - {"__all__"}


def mutated_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
                yield target.value.id
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in MUTATING_METHODS
            and isinstance(node.func.value, ast.Name)
        ):
            yield node.func.value.id


@pytest.mark.parametrize("module", SOURCES)
def test_there_is_no_module_level_state(module: str) -> None:
    tree = TREES[module]
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Global), (
            f"{module} line {node.lineno}: global {', '.join(node.names)}"
        )
    containers = module_level_containers(tree)
    variables = {name for name in containers if name != name.upper()}
    assert not variables, f"{module} keeps state in {variables}; constants are written in capitals"
    changed = containers & set(mutated_names(tree))
    assert not changed, f"{module} changes {changed} after import"


def calls(tree: ast.Module, names: set[str]) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
            yield node


OWN_ERRORS = {
    "ApiError",
    "CapacityError",
    "ConfigError",
    "EngineDead",
    "ModelError",
    "PromptTooLong",
    "RequestError",
}


def has_hint(call: ast.Call) -> bool:
    """As an argument, or in the text of an answer over HTTP. A text that is made elsewhere has its own."""
    texts = [
        node for node in ast.walk(call) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    is_made_here = any(" " in text.value for text in texts)
    return (
        any(keyword.arg == "hint" for keyword in call.keywords)
        or any("hint: " in text.value for text in texts)
        or not is_made_here
    )


@pytest.mark.parametrize("module", SOURCES)
def test_every_error_has_a_hint(module: str) -> None:
    for call in calls(TREES[module], OWN_ERRORS):
        assert has_hint(call), f"{module} line {call.lineno}: say what a user can do"


@pytest.mark.parametrize(
    "module", [name for name in SOURCES if part_of(name) in ("models", "weights", "text")]
)
def test_values_in_messages_are_marked_where_they_are_cut(module: str) -> None:
    """By `shown` and `printable` of tiny_vllm/errors.py: a format marks no cut."""
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.FormattedValue):
            spec = "" if node.format_spec is None else ast.unparse(node.format_spec)
            assert node.conversion == -1 and "." not in spec, f"{module} line {node.lineno}: use shown"


def test_public_names_are_complete_and_importable() -> None:
    import tiny_vllm

    assert set(tiny_vllm.__all__) >= PUBLIC_NAMES
    assert len(set(tiny_vllm.__all__)) == len(tiny_vllm.__all__)
    for name in tiny_vllm.__all__:
        assert getattr(tiny_vllm, name) is not None


def test_every_user_error_is_a_value_error() -> None:
    from tiny_vllm import errors

    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    assert all(issubclass(error, errors.TinyVLLMError) for error in classes)
    for error in (errors.ConfigError, errors.ModelError, errors.RequestError, errors.CapacityError):
        assert issubclass(error, ValueError)


@pytest.mark.parametrize(
    "command",
    ["generate", "chat", "serve", "demo", "info"]
    + [f"bench {name}" for name in ("throughput", "latency", "decode", "kernels")],
)
def test_every_engine_option_is_on_the_command_line(command: str) -> None:
    from tiny_vllm.cli.main import build_parser
    from tiny_vllm.config import EngineConfig

    parsed = vars(build_parser().parse_args(command.split()))
    assert {option.name for option in fields(EngineConfig)} <= parsed.keys()
