"""The weight tape's geometry: who owns which rows, how they are cut into chunks, and what fits into a block.

Every matrix [rows, columns] is cut into units of 8 rows, dealt out evenly to CTAS blocks, and each unit
into KB chunks of CK columns, a multiple of 256 and at most 1024, so that a chunk is at most 16 KB. Both are
padded with zeros: `TapeLayout.overhead` says by how much. Inside a chunk come 4 quarters of the columns
(one per warp), and in a quarter its two halves side by side, 32 columns of each, so that what a warp loads at
once lies together; `pack.pack_matrix` has the whole order.

A unit of gate and up holds 4 rows of gate and the 4 rows of up that belong to them.
"""

from __future__ import annotations

from dataclasses import dataclass

NUM_BLOCKS = 128
UNIT_ROWS = 8
MAX_CHUNK_COLUMNS = 1024
CHUNK_BYTES = UNIT_ROWS * MAX_CHUNK_COLUMNS * 2
TOKEN_BUCKETS = (1, 2, 4, 8)
SHARED_BYTES = 232_448
"""What one block can have on sm_90: 227 KB."""
XS_PADDING = 64
MAX_OVERHEAD = 0.08
MAX_PART_FLOATS = 16_384
MAX_STAGES = 12
WINDOW = 3
"""Chunks in flight per block: 48 KB saturate memory, more makes the blocks' shares unequal."""
NUM_CONSUMERS = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class TapeShape:
    """What the kernel is generated for: a Llama-like model and its page size, in tokens."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    page_size: int
    qkv_bias: bool = False
    qk_norm: bool = False

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        return self.q_size + 2 * self.num_kv_heads * self.head_dim

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_weights(self) -> int:
        """Values that a step reads from the tape's matrices."""
        layer = (self.qkv_size + self.q_size + 3 * self.intermediate_size) * self.hidden_size
        return self.num_layers * layer + self.vocab_size * self.hidden_size


def _ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


@dataclass(frozen=True, slots=True)
class MatrixLayout:
    """units: per block. num_column_chunks (KB) chunks of chunk_columns (CK) columns each per unit.
    by_unit: chunks go unit by unit; otherwise all units' first columns come first."""

    rows: int
    columns: int
    units: int
    num_column_chunks: int
    chunk_columns: int
    by_unit: bool

    @property
    def num_chunks(self) -> int:
        return self.units * self.num_column_chunks

    @property
    def num_values(self) -> int:
        """Of all blocks, padding included."""
        return NUM_BLOCKS * self.num_chunks * UNIT_ROWS * self.chunk_columns

    def part_floats(self, tokens: int) -> int:
        """Partial sums of one unit, and padding."""
        slices = self.num_column_chunks * 4 if self.by_unit else 16
        return slices * tokens * UNIT_ROWS + UNIT_ROWS


def _matrix(rows: int, columns: int, *, by_unit: bool = True, unit_rows: int = UNIT_ROWS) -> MatrixLayout:
    num_column_chunks = _ceil_div(columns, MAX_CHUNK_COLUMNS)
    chunk_columns = _ceil_div(_ceil_div(columns, 256), num_column_chunks) * 256
    units = _ceil_div(_ceil_div(rows, unit_rows), NUM_BLOCKS)
    return MatrixLayout(rows, columns, units, _ceil_div(columns, chunk_columns), chunk_columns, by_unit)


@dataclass(frozen=True, slots=True)
class TapeLayout:
    """The five matrices of a shape. gate_up's units are counted by its rows of gate."""

    shape: TapeShape
    qkv: MatrixLayout
    output: MatrixLayout
    gate_up: MatrixLayout
    down: MatrixLayout
    lm_head: MatrixLayout

    @classmethod
    def of(cls, shape: TapeShape) -> TapeLayout:
        return cls(
            shape,
            qkv=_matrix(shape.qkv_size, shape.hidden_size),
            output=_matrix(shape.hidden_size, shape.q_size),
            gate_up=_matrix(shape.intermediate_size, shape.hidden_size, unit_rows=UNIT_ROWS // 2),
            down=_matrix(shape.hidden_size, shape.intermediate_size, by_unit=False),
            lm_head=_matrix(shape.vocab_size, shape.hidden_size),
        )

    @property
    def layer_values(self) -> int:
        return sum(m.num_values for m in (self.qkv, self.output, self.gate_up, self.down))

    @property
    def num_bytes(self) -> int:
        """Of the whole tape, BF16."""
        return 2 * (self.shape.num_layers * self.layer_values + self.lm_head.num_values)

    @property
    def overhead(self) -> float:
        """Padding, as a share of the weights that a step reads."""
        return self.num_bytes / 2 / self.shape.num_weights - 1


def splits(shape: TapeShape, tokens: int) -> int:
    """Blocks per (token, KV head) in attention: a power of two, 0 if there are more pairs than blocks."""
    return (
        1 << (NUM_BLOCKS // (tokens * shape.num_kv_heads)).bit_length() - 1
        if tokens * shape.num_kv_heads <= NUM_BLOCKS
        else 0
    )


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """How a block's shared memory is used for one number of tokens.

    stages: of the ring. xs_columns: of the input vectors, held at a time. part_floats: of partial sums.
    shared_bytes: in all.
    """

    stages: int
    xs_columns: int
    part_floats: int
    shared_bytes: int


def plan_block(layout: TapeLayout, tokens: int) -> BlockPlan | None:
    """The plan with the deepest ring, or None if nothing fits."""
    shape = layout.shape
    whole = (layout.qkv, layout.output, layout.gate_up, layout.lm_head)
    least_columns = max(m.num_column_chunks * m.chunk_columns for m in whole)
    columns = _down_columns(layout, least_columns, tokens)
    part = least_part = max(
        16 * shape.group * 64,
        *(m.units * m.part_floats(tokens) for m in (layout.qkv, layout.output, layout.down)),
        *(4 * m.part_floats(tokens) for m in (layout.gate_up, layout.lm_head)),
    )
    if layout.output.units * UNIT_ROWS * tokens > NUM_CONSUMERS:
        return None  # a thread keeps one residual
    fixed = tokens * (columns * 2 + XS_PADDING) + part * 4 + _small_bytes(shape, tokens)
    stages = min((SHARED_BYTES - fixed) // CHUNK_BYTES, MAX_STAGES)
    # Else a warp group could mistake an earlier use of a stage, by another group, for the next one.
    if stages < 4 + WINDOW:
        stages = stages // 4 * 4
    if stages == 0:
        return None
    # What is left lets more units' partial sums wait for one addition.
    spare = (SHARED_BYTES - fixed - stages * CHUNK_BYTES) // 32 * 8
    part += min(spare, MAX_PART_FLOATS - part)
    return BlockPlan(stages, columns, part, stages * CHUNK_BYTES + fixed + 4 * (part - least_part))


def _down_columns(layout: TapeLayout, least: int, tokens: int) -> int:
    """Columns of the down projection's input to hold at a time, at least as many as the others need."""
    down = layout.down
    whole = down.num_column_chunks * down.chunk_columns
    budget = max(16_384, least * 2 * tokens)
    if whole * 2 * tokens <= budget:
        return max(whole, least)
    # A pass must be a whole number of rounds of the four warp groups.
    step = next(k for k in (1, 2, 4) if k * down.units % 4 == 0) * down.chunk_columns
    columns = max(budget // (2 * tokens) // step, _ceil_div(least, step)) * step
    return min(columns, max(whole, least))


def _small_bytes(shape: TapeShape, tokens: int) -> int:
    """`struct Shared` in tape.cu, with the most ring stages."""
    attention = 2 * (shape.group * (shape.head_dim + 32) + 2 * shape.head_dim)
    attention += 4 * (16 * shape.group * 2 + 2 * splits(shape, tokens) * shape.group)
    draw = 8 * tokens * 16
    per_token = _ceil_div(shape.hidden_size, 256) * 4 + 8 + 3 * 4 + 2 * 4 + 4
    rest = shape.head_dim * 4 + tokens * per_token + MAX_STAGES * 16 + 64 + 48
    rest += 4 * tokens * _ceil_div(_ceil_div(shape.hidden_size, UNIT_ROWS), NUM_BLOCKS) * UNIT_ROWS
    return _ceil_div(max(attention, draw) + rest, 16) * 16


def unsupported(shape: TapeShape) -> str | None:
    """Why there is no kernel for this shape, or None."""
    if shape.head_dim not in (64, 128):
        return f"the head size {shape.head_dim} is neither 64 nor 128"
    if shape.num_heads % shape.num_kv_heads or shape.group > 8:
        return f"{shape.num_heads} query heads on {shape.num_kv_heads} KV heads are not 1 to 8 each"
    if shape.page_size % 16:
        return f"the page size {shape.page_size} is no multiple of 16"
    if shape.hidden_size % 8 or shape.intermediate_size % 8:
        return "the hidden or the intermediate size is no multiple of 8"
    layout = TapeLayout.of(shape)
    # The exchange relies on every block's having published a part of the hidden vector.
    if (NUM_BLOCKS - 1) * layout.output.units * UNIT_ROWS >= shape.hidden_size:
        return f"{shape.hidden_size} hidden values in units of {UNIT_ROWS} do not reach {NUM_BLOCKS} blocks"
    overhead = layout.overhead
    if overhead > MAX_OVERHEAD:
        return f"dealing its rows to {NUM_BLOCKS} blocks would add {overhead:.0%} to what a step reads"
    if not token_buckets(shape):
        return "its vectors do not fit into a block's shared memory"
    return None


def token_buckets(shape: TapeShape) -> tuple[int, ...]:
    """Numbers of tokens whose vectors fit, rising."""
    layout = TapeLayout.of(shape)
    return tuple(
        tokens
        for tokens in TOKEN_BUCKETS
        if splits(shape, tokens) * 64 >= shape.head_dim and plan_block(layout, tokens) is not None
    )


def defines(layout: TapeLayout, tokens: int) -> dict[str, int]:
    """The macros that tape.cu is compiled with."""
    shape, plan = layout.shape, plan_block(layout, tokens)
    assert plan is not None
    values = {
        "CTAS": NUM_BLOCKS,
        "TOKENS": tokens,
        "STAGES": plan.stages,
        "CHUNK_BYTES": CHUNK_BYTES,
        "XS_COLUMNS": plan.xs_columns,
        "PART_FLOATS": plan.part_floats,
        "SMALL_BYTES": _small_bytes(shape, tokens),
        "SPLITS": splits(shape, tokens),
        "HIDDEN": shape.hidden_size,
        "INTERMEDIATE": shape.intermediate_size,
        "LAYERS": shape.num_layers,
        "HEADS": shape.num_heads,
        "KV_HEADS": shape.num_kv_heads,
        "HEAD_DIM": shape.head_dim,
        "VOCAB": shape.vocab_size,
        "PAGE_SIZE": shape.page_size,
        "QKV_BIAS": int(shape.qkv_bias),
        "QK_NORM": int(shape.qk_norm),
        "EXCHANGE_WORDS": exchange_words(shape, tokens),
    }
    for name, matrix in (
        ("QKV", layout.qkv),
        ("OUT", layout.output),
        ("UP", layout.gate_up),
        ("DOWN", layout.down),
        ("HEAD", layout.lm_head),
    ):
        values[f"{name}_UNITS"] = matrix.units
        values[f"{name}_KB"] = matrix.num_column_chunks
        values[f"{name}_CK"] = matrix.chunk_columns
    return values


def exchange_words(shape: TapeShape, tokens: int) -> int:
    """32-bit words of the buffer in which blocks exchange results."""
    pairs = tokens * shape.num_kv_heads * splits(shape, tokens)
    vectors = shape.qkv_size + shape.q_size + 2 * shape.hidden_size + shape.intermediate_size
    # Segments may lie apart: at most 32 values per 8.
    values = _ceil_div(4 * tokens * vectors, 8) * 8 + 5 * 128
    # Two buffers of BF16 vectors are as many words as one has values.
    return values + pairs * shape.group * (2 * shape.head_dim + 4) + 4 * tokens * NUM_BLOCKS
