"""What the compiler decided for each kernel of a GPU binary, read without a GPU and without NVIDIA's tools.

A cubin is an ELF file. Its section `.nv.info` is a list of records: format (1 byte), attribute (1 byte), a
16-bit value or, for format 4, the length of what follows: the index of the kernel's symbol and a value, 32
bits each.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

FORMAT_WITH_LENGTH = 4
FRAME_SIZE, REGISTER_COUNT = 0x11, 0x2F


class ResourceUsage(NamedTuple):
    """registers: per thread. stack_bytes: per thread, for spilled registers and arrays the compiler cannot
    index."""

    registers: int
    stack_bytes: int


class _Section(NamedTuple):
    name: int
    type: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_size: int


def resource_usage(cubin: bytes) -> dict[str, ResourceUsage]:
    """Kernel (and device function that was not inlined) -> its registers and stack."""
    assert cubin.startswith(b"\x7fELF"), "not a GPU binary"
    table, entry_size, count, names_index = (
        *struct.unpack_from("<Q", cubin, 0x28),
        *struct.unpack_from("<HHH", cubin, 0x3A),
    )
    sections = [
        _Section(*struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * entry_size)) for i in range(count)
    ]
    names = sections[names_index]
    by_name = {_text(cubin, names.offset + section.name): section for section in sections}
    info, symbols = by_name[".nv.info"], by_name[".symtab"]
    texts = sections[symbols.link]
    found: dict[int, dict[int, int]] = {}
    position = info.offset
    while position < info.offset + info.size:
        form, attribute, length = struct.unpack_from("<BBH", cubin, position)
        position += 4
        if form != FORMAT_WITH_LENGTH:
            continue
        if attribute in (FRAME_SIZE, REGISTER_COUNT):
            symbol, value = struct.unpack_from("<II", cubin, position)
            found.setdefault(symbol, {})[attribute] = value
        position += length
    usage = {}
    for symbol, values in found.items():
        if REGISTER_COUNT not in values:  # a function that belongs to a kernel, such as a slow path
            continue
        (name,) = struct.unpack_from("<I", cubin, symbols.offset + symbol * symbols.entry_size)
        usage[_text(cubin, texts.offset + name)] = ResourceUsage(values[REGISTER_COUNT], values[FRAME_SIZE])
    return usage


def _text(cubin: bytes, start: int) -> str:
    return cubin[start : cubin.index(b"\0", start)].decode()
