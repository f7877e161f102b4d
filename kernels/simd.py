"""Straight-line vector code for the CPU kernels: Numba intrinsics that work on 16 fp32 lanes at a time.

Numba's own loops leave the shuffles of a Walsh-Hadamard transform and the table look-ups of a quantizer to the
compiler, which finds neither. Here each *codelet* writes the instructions of 16 to 64 vectors one after the other, in
LLVM's portable vector types: AVX-512 executes them as they are, other machines in halves or quarters. Only the table
look-up names an instruction (AVX-512's permutes) and has a portable form beside it. No loops, no calls, no memory but
what the addresses point to; every address is an integer, and alignment is not assumed.

Layout of a group of 16 blocks: row r of ``z`` starts ``pitch`` bytes after row r - 1. In *row order* it is block r; a
transposed *tile* of 16 x 16 holds, in row r, coordinate 16 c + r of all 16 blocks, one lane each.
"""

from __future__ import annotations

import inspect

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
CHUNK = 8  # coordinates that one call quantizes: what 32 registers hold without spilling
FP32, BF16, FP16, ADD_FP32 = range(4)  # element kinds of the input and output; the last adds to what is there
STREAM = 4  # added to a kind: its output is aligned, and written past the caches
PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}
DEGREE = {1: 0, 2: 1, 3: 1, 4: 1, 5: 2, 6: 2, 7: 4, 8: 4}  # of the polynomial that guesses the index of a level
SYMMETRIC = 7  # bits from which the decoder looks up magnitudes and sets the sign; bytewise where permutes allow it
_EXPONENT = (
    0x4B000000  # the bits of 2.0**23: added to a number below 2**22 it leaves the rounded integer in the low ones
)

_FLOAT, _INT, _SHORT, _BIT = ir.FloatType(), ir.IntType(32), ir.IntType(16), ir.IntType(1)
_FLOATS, _INTS, _SHORTS = (ir.VectorType(t, LANES) for t in (_FLOAT, _INT, _SHORT))
_HALVES, _BITS = ir.VectorType(ir.HalfType(), LANES), ir.VectorType(_BIT, LANES)
_BYTES = ir.VectorType(ir.IntType(8), 4 * LANES)
_SIZE = {FP32: 4, BF16: 2, FP16: 2, ADD_FP32: 4}
_SIZE |= {STREAM + kind: _SIZE[kind] for kind in (FP32, BF16, FP16)}


def table_size(entries: int) -> int:
    """Entries of a table as the look-up reads it: at least the 16 of one register."""
    return max(LANES, entries)


def level_table_size(bits: int) -> int:
    """Entries of the decoder's table: all levels, or from SYMMETRIC bits on the positive ones.

    Those follow a second time as four planes: the lowest bytes of all of them, the next, ...
    """
    return table_size(1 << (bits - (bits >= SYMMETRIC)))


class _Vector:
    """An LLVM vector of 16 floats or 32-bit integers with Python's operators."""

    def __init__(self, code: _Code, value: ir.Value) -> None:
        self.code, self.value = code, value

    def _wrap(self, value: ir.Value) -> _Vector:
        return _Vector(self.code, value)

    def _other(self, other: _Vector | int | float) -> ir.Value:
        return other.value if isinstance(other, _Vector) else self.code.constant(other, self.value.type)

    def __add__(self, other: _Vector | int | float) -> _Vector:
        add = self.code.b.fadd if self.value.type == _FLOATS else self.code.b.add
        return self._wrap(add(self.value, self._other(other)))

    def __sub__(self, other: _Vector) -> _Vector:
        return self._wrap(self.code.b.fsub(self.value, other.value))

    def __mul__(self, other: _Vector) -> _Vector:
        return self._wrap(self.code.b.fmul(self.value, other.value))

    def __and__(self, other: _Vector | int) -> _Vector:
        return self._wrap(self.code.b.and_(self.value, self._other(other)))

    def __or__(self, other: _Vector) -> _Vector:
        return self._wrap(self.code.b.or_(self.value, other.value))

    def __xor__(self, other: _Vector | int) -> _Vector:
        return self._wrap(self.code.b.xor(self.value, self._other(other)))

    def __lshift__(self, count: int) -> _Vector:
        return self if count == 0 else self._wrap(self.code.b.shl(self.value, self._other(count)))

    def __rshift__(self, count: int) -> _Vector:
        return self if count == 0 else self._wrap(self.code.b.lshr(self.value, self._other(count)))

    def __gt__(self, other: _Vector | float) -> ir.Value:
        return self.code.b.fcmp_ordered(">", self.value, self._other(other))

    def ints(self) -> _Vector:
        return self._wrap(self.code.b.bitcast(self.value, _INTS))

    def floats(self) -> _Vector:
        return self._wrap(self.code.b.bitcast(self.value, _FLOATS))


class _Code:
    """Writes vector instructions at the builder's position. Every address is an i64 value, every offset in bytes."""

    def __init__(self, context, builder) -> None:
        self.b = builder
        features = context.codegen().magic_tuple()[2].split(",")
        self.wide_permutes, self.byte_permutes = "+avx512f" in features, "+avx512vbmi" in features

    def constant(self, value: int | float, type_: ir.Type = _FLOATS) -> ir.Constant:
        return ir.Constant(type_, [value] * LANES)

    def vector(self, value: int | float, type_: ir.Type = _FLOATS) -> _Vector:
        return _Vector(self, self.constant(value, type_))

    def at(self, address: ir.Value, offset: int | ir.Value, type_: ir.Type) -> ir.Value:
        offset = ir.Constant(address.type, offset) if isinstance(offset, int) else offset
        return self.b.inttoptr(self.b.add(address, offset), type_.as_pointer())

    def times(self, count: ir.Value, factor: int) -> ir.Value:
        return self.b.mul(count, ir.Constant(count.type, factor))

    def read(self, address: ir.Value, offset: int | ir.Value, type_: ir.Type = _FLOATS) -> ir.Value:
        return self.b.load(self.at(address, offset, type_), align=1)

    def load(self, address: ir.Value, offset: int | ir.Value = 0, type_: ir.Type = _FLOATS) -> _Vector:
        return _Vector(self, self.read(address, offset, type_))

    def store(
        self, vector: _Vector, address: ir.Value, offset: int | ir.Value = 0, align: int = 1, stream: bool = False
    ) -> None:
        stored = self.b.store(vector.value, self.at(address, offset, vector.value.type), align=align)
        if stream:
            stored.set_metadata("nontemporal", self.b.module.add_metadata([ir.Constant(_INT, 1)]))

    def splat(self, scalar: ir.Value) -> _Vector:
        vector_type = ir.VectorType(scalar.type, LANES)
        first = self.b.insert_element(ir.Constant(vector_type, ir.Undefined), scalar, ir.Constant(_INT, 0))
        zeros = ir.Constant(_INTS, [0] * LANES)
        return _Vector(self, self.b.shuffle_vector(first, ir.Constant(vector_type, ir.Undefined), zeros))

    def fma(self, a: _Vector, b: _Vector, c: _Vector) -> _Vector:
        return self.call("llvm.fma.v16f32", a, b, c)

    def call(self, name: str, *arguments: _Vector) -> _Vector:
        """An LLVM intrinsic whose result has the type of its first argument."""
        values = [a.value for a in arguments]
        type_ = ir.FunctionType(values[0].type, [v.type for v in values])
        return _Vector(self, self.b.call(cgutils.get_or_insert_function(self.b.module, type_, name), values))

    def select(self, mask: ir.Value, a: _Vector, b: _Vector) -> _Vector:
        return _Vector(self, self.b.select(mask, a.value, b.value))

    def shuffle(self, a: _Vector, b: _Vector, lanes: list[int]) -> _Vector:
        return _Vector(self, self.b.shuffle_vector(a.value, b.value, ir.Constant(_INTS, lanes)))

    def shuffle_bytes(self, a: _Vector, b: _Vector, bytes_of_lane: list[int]) -> _Vector:
        """In every lane the bytes named: 0-3 are the lane's own of a (lowest first), 4-7 of b."""
        places = [4 * lane + (k if k < 4 else k - 4 + 4 * LANES) for lane in range(LANES) for k in bytes_of_lane]
        a, b = (self.b.bitcast(v.value, _BYTES) for v in (a, b))
        found = self.b.shuffle_vector(a, b, ir.Constant(ir.VectorType(_INT, len(places)), places))
        return _Vector(self, self.b.bitcast(found, _INTS))

    def add_to(self, sums: ir.Value, first: _Vector, second: _Vector, offset: int = 0) -> None:
        self.store(self.load(sums, offset) + first, sums, offset)
        self.store(self.load(sums, offset + 64) + second, sums, offset + 64)

    def load_as_fp32(self, kind: int, address: ir.Value, offset: int | ir.Value) -> _Vector:
        if kind == BF16:
            shorts = self.read(address, offset, _SHORTS)
            return (_Vector(self, self.b.zext(shorts, _INTS)) << 16).floats()
        if kind == FP16:
            return _Vector(self, self.b.fpext(self.read(address, offset, _HALVES), _FLOATS))
        return self.load(address, offset)

    def store_from_fp32(self, kind: int, v: _Vector, address: ir.Value, offset: int | ir.Value) -> None:
        align, stream = (LANES * _SIZE[kind], True) if kind >= STREAM else (1, False)
        kind %= STREAM
        if kind == ADD_FP32:
            v = self.load(address, offset) + v
        elif kind == BF16:  # round to nearest, ties to even; NaN stays NaN
            bits = v.ints()
            rounded = (bits + ((bits >> 16) & 1) + 0x7FFF) >> 16
            nan = self.b.fcmp_unordered("uno", v.value, v.value)
            rounded = self.select(nan, self.vector(0x7FC0, _INTS), rounded)
            v = _Vector(self, self.b.trunc(rounded.value, _SHORTS))
        elif kind == FP16:
            v = _Vector(self, self.b.fptrunc(v.value, _HALVES))
        self.store(v, address, offset, align, stream)

    def minus_one(self) -> _Vector | None:
        """-1.0, hidden from the optimiser, so that a - b = fma(b, -1, a) stays in the multiplier's pipes.

        Some processors add and multiply in different pipes; sums then fill one and differences the other.
        """
        if not self.wide_permutes:
            return None
        type_ = ir.FunctionType(_FLOATS, [_FLOATS])
        return _Vector(self, self.b.asm(type_, "", "=v,0", [self.constant(-1.0)], False))

    def butterflies(self, v: list[_Vector]) -> list[_Vector]:
        """Unnormalised Walsh-Hadamard transform across the list, lane by lane."""
        minus = self.minus_one()
        half = 1
        while half < len(v):
            for i in range(len(v)):
                if not i & half:
                    v[i], v[i + half] = (
                        v[i] + v[i + half],
                        self.fma(v[i + half], minus, v[i]) if minus else v[i] - v[i + half],
                    )
            half *= 2
        return v

    def transpose(self, rows: list[_Vector]) -> list[_Vector]:
        """16 vectors of 16 lanes: lane l of vector r becomes lane r of vector l, in 64 two-source shuffles."""

        def interleave(v: list[_Vector], width: int, distance: int) -> list[_Vector]:
            # inside each 128-bit quarter: the low (high) halves of a and b side by side
            out = list(v)
            for i in range(LANES):
                if not i & distance:
                    a, b = v[i], v[i + distance]
                    starts = [q + j for q in range(0, LANES, 4) for j in range(0, 2, width)]
                    low = [at + source + k for at in starts for source in (0, LANES) for k in range(width)]
                    out[i], out[i + distance] = (
                        self.shuffle(a, b, low), self.shuffle(a, b, [lane + 2 for lane in low])
                    )  # fmt: skip
            return out

        def quarters(v: list[_Vector], distance: int) -> list[_Vector]:
            # quarters 0 and 2 of a and of b, then quarters 1 and 3
            out = list(v)
            for i in range(LANES):
                if not i & distance:
                    a, b = v[i], v[i + distance]
                    even = [s + 4 * q + k for s in (0, LANES) for q in (0, 2) for k in range(4)]
                    out[i], out[i + distance] = (
                        self.shuffle(a, b, even), self.shuffle(a, b, [lane + 4 for lane in even])
                    )  # fmt: skip
            return out

        v = interleave(rows, 1, 1)  # within quarters: lanes 0, 1 of pairs of rows
        v = interleave(v, 2, 2)
        v = quarters(v, 4)
        v = quarters(v, 8)
        return [v[i & ~3 | (0, 2, 1, 3)[i & 3]] for i in range(LANES)]  # the two interleavings swap columns 1 and 2


class _Table:
    """``size`` entries of 32 bits at an address, looked up by the low bits of 16 indices at a time."""

    def __init__(self, code: _Code, address: ir.Value, size: int, type_: ir.Type = _FLOATS) -> None:
        self.code, self.address, self.size, self.type = code, address, size, type_
        if code.wide_permutes:
            self.parts = [code.load(address, 64 * i, type_) for i in range(size // LANES)]

    def __getitem__(self, index: _Vector) -> _Vector:
        b = self.code.b
        if not self.code.wide_permutes:
            value = ir.Constant(self.type, ir.Undefined)
            masked = (index & (self.size - 1)).value
            for lane in range(LANES):
                at = b.zext(b.extract_element(masked, ir.Constant(_INT, lane)), ir.IntType(64))
                entry = self.code.read(self.address, b.shl(at, ir.Constant(at.type, 2)), self.type.element)
                value = b.insert_element(value, entry, ir.Constant(_INT, lane))
            return _Vector(self.code, value)
        floats = self.type == _FLOATS
        if self.size == LANES:
            return self.code.call(f"llvm.x86.avx512.permvar.{'sf' if floats else 'si'}.512", self.parts[0], index)
        pair = f"llvm.x86.avx512.vpermi2var.{'ps' if floats else 'd'}.512"
        found = [
            self.code.call(pair, low, index, high) for low, high in zip(self.parts[::2], self.parts[1::2], strict=True)
        ]
        bit = 2 * LANES
        while len(found) > 1:  # the higher bits of the index choose among the pairs of registers
            mask = b.icmp_unsigned("!=", (index & bit).value, ir.Constant(_INTS, [0] * LANES))
            found = [self.code.select(mask, high, low) for low, high in zip(found[::2], found[1::2], strict=True)]
            bit *= 2
        return found[0]


_KIND_OF = {types.float32: FP32, types.uint16: BF16, types.int16: FP16, types.float64: ADD_FP32}
_KIND_OF |= {types.int32: STREAM + FP32, types.uint8: STREAM + BF16, types.int8: STREAM + FP16}
KIND_TAGS = {kind: getattr(np, type_.name)(0) for type_, kind in _KIND_OF.items()}


def _static(type_):
    """The value that a type stands for: a literal; the length of a tuple; the element kind that a scalar type tags.

    So one argument's type selects the variant that Numba compiles, and a kernel is compiled for what is used only.
    """
    if isinstance(type_, types.Literal):
        return type_.literal_value
    return type_.count if isinstance(type_, types.UniTuple) else _KIND_OF[type_]


def _codelet(*static: str):
    """Makes an intrinsic of ``write(code, **arguments)``; arguments named in ``static`` arrive as Python values.

    Integers are addresses, offsets and counts; the others are scalars as Numba types them.
    """

    def decorate(write):
        names = write.__code__.co_varnames[1 : write.__code__.co_argcount]

        def typer(typingctx, *argument_types):
            known = {}
            for name, type_ in zip(names, argument_types, strict=True):
                if name in static:
                    known[name] = _static(type_)

            def codegen(context, builder, signature, arguments):
                given = {n: known.get(n, a) for n, a in zip(names, arguments, strict=True)}
                write(_Code(context, builder), **given)
                return context.get_dummy_value()

            taken = [
                type_ if name in static or isinstance(type_, types.Float) else types.int64
                for name, type_ in zip(names, argument_types, strict=True)
            ]
            return types.void(*taken), codegen

        typer.__name__, typer.__doc__ = write.__name__, write.__doc__
        parameters = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in ("typingctx", *names)]
        typer.__signature__ = inspect.Signature(parameters)  # Numba takes the number of arguments from it
        return intrinsic(prefer_literal=True)(typer)

    return decorate


@_codelet()
def copy_bytes(code, target, source, count):
    """memcpy."""
    pointer = ir.IntType(8).as_pointer()
    b = code.b
    cgutils.raw_memcpy(b, b.inttoptr(target, pointer), b.inttoptr(source, pointer), count, 1)


@_codelet()
def zero_bytes(code, target, count):
    """memset with 0."""
    cgutils.memset(code.b, code.b.inttoptr(target, ir.IntType(8).as_pointer()), count, 0)


@_codelet()
def fence(code):
    """Waits for the writes past the caches, which no other order binds."""
    code.b.fence("seq_cst")


@intrinsic
def take_next(typingctx, counter):
    """The int64 at an address before one is added to it, atomically."""

    def codegen(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.int64), codegen


@intrinsic
def as_pointer(typingctx, address):
    """An address as what ``numba.carray`` takes."""

    def codegen(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), codegen


@_codelet("write")
def prefetch_1kb(code, address, write):
    """Asks for the 16 cache lines from an address on, to be read or written soon; any address is allowed."""
    flags = [
        ir.Constant(_INT, f) for f in (int(write), 2, 1)
    ]  # for writing?, in the second cache (the first is full of this group), data
    pointer = ir.IntType(8).as_pointer()
    type_ = ir.FunctionType(ir.VoidType(), [pointer, *(f.type for f in flags)])
    function = cgutils.get_or_insert_function(code.b.module, type_, "llvm.prefetch.p0")
    for i in range(16):
        code.b.call(function, [code.at(address, 64 * i, ir.IntType(8)), *flags])


@_codelet("kind")
def widen(code, source, kind, target):
    """16 elements to fp32."""
    code.store(code.load_as_fp32(kind, source, 0), target)


@_codelet("kind", "radix")
def load_butterflies(code, source, kind, signs, z, energy, stride, radix):
    """Row order: vectors 0, stride, ... of a block times signs, butterflies across them, into z; adds their squares."""
    square = code.load(energy)
    v = []
    for i in range(radix):
        x = code.load_as_fp32(kind, source, code.times(stride, i * LANES * _SIZE[kind]))
        square = code.fma(x, x, square)
        v.append((x.ints() ^ code.load(signs, code.times(stride, i * 64), _INTS)).floats())
    code.store(square, energy)
    for i, x in enumerate(code.butterflies(v)):
        code.store(x, z, code.times(stride, i * 64))


@_codelet("radix")
def butterflies(code, z, stride, radix):
    """Butterflies across vectors 0, stride, ... in place."""
    v = code.butterflies([code.load(z, code.times(stride, i * 64)) for i in range(radix)])
    for i, x in enumerate(v):
        code.store(x, z, code.times(stride, i * 64))


def _steps(code, v, signs, steps):
    for step in steps:
        if step == "T":
            v = code.transpose(v)
        elif step == "H":
            v = code.butterflies(v)
        else:  # "S": in a transposed tile every row has one sign
            v = [(x.ints() ^ code.splat(code.read(signs, 4 * r, _INT))).floats() for r, x in enumerate(v)]
    return v


@_codelet("steps")
def tile(code, z, pitch, signs, steps):
    """One 16 x 16 tile in place: T transposes, H transforms across the 16 rows, S multiplies row r by its sign."""
    offsets = [code.times(pitch, r) for r in range(LANES)]
    v = _steps(code, [code.load(z, offset) for offset in offsets], signs, steps)
    for x, offset in zip(v, offsets, strict=True):
        code.store(x, z, offset)


@_codelet()
def sum_rows(code, z, target):
    """Lane r of the target: sum of the 16 numbers of row r (rows one after the other)."""
    v = code.transpose([code.load(z, 64 * r) for r in range(LANES)])
    while len(v) > 1:
        v = [a + b for a, b in zip(v[::2], v[1::2], strict=True)]
    code.store(v[0], target)


class _Quantizer:
    """Nearest level of non-negative numbers by one guess and one comparison; ``cpu._look_up`` makes the tables.

    At ``tables``: thresholds, magnitudes of the levels (each of ``table_size`` fp32), the largest threshold, the
    coefficients of the guess from the first power on.
    """

    def __init__(self, code, bits, tables):
        self.code, self.half = code, 1 << (bits - 1)
        size = table_size(self.half)
        self.thresholds = _Table(code, tables, size)
        self.magnitudes = _Table(code, code.b.add(tables, ir.Constant(tables.type, 4 * size)), size)
        numbers = [code.splat(code.read(tables, 8 * size + 4 * i, _FLOAT)) for i in range(1 + DEGREE[bits])]
        self.largest, self.coefficients = numbers[0], numbers[1:]

    def __call__(self, u):
        """(integer with the index of the level in its low bits and _EXPONENT above, the level)"""
        code = self.code
        # the guess is right or one too low; kept as a float until the comparison, whose addition can then be masked
        zero, last = 2.0**23 + self.half - 1, 2.0**23 + 2 * self.half - 2
        guess = code.vector(zero)
        if len(self.coefficients) == 1:  # a line goes on rising, so what lies beyond is cut off
            guess = code.fma(u, self.coefficients[0], guess)
            guess = code.select(guess > last, code.vector(last), guess)
        elif self.coefficients:
            near, slope = code.select(u > self.largest, self.largest, u), self.coefficients[-1]
            for coefficient in self.coefficients[-2::-1]:
                slope = code.fma(slope, near, coefficient)
            guess = code.fma(slope, near, guess)
        if self.half == 1:
            index = (guess + 1.0).ints()
        else:
            index = code.select(u > self.thresholds[guess.ints()], guess + 1.0, guess).ints()
        return index, self.magnitudes[index]


@_codelet("bits", "count")
def try_scales(code, z, pitch, units, tables, sums, bits, count):
    """What 8 coordinates of 16 blocks lose when u = |z| * unit is quantized, for ``count`` rows of units [count, 16].

    Adds |u - q|^2 and <u, u - q> to sums [count, 2, 16].
    """
    quantizer = _Quantizer(code, bits, tables)
    scales = [code.load(units, 64 * k) for k in range(count)]
    squares, products = [[code.vector(0.0)] * count for _ in range(2)]
    for r in range(CHUNK):
        magnitude = (code.load(z, code.times(pitch, r)).ints() & 0x7FFFFFFF).floats()
        for k, scale in enumerate(scales):
            u = magnitude * scale
            residual = u - quantizer(u)[1]
            squares[k], products[k] = code.fma(residual, residual, squares[k]), code.fma(u, residual, products[k])
    for k in range(count):
        code.add_to(sums, squares[k], products[k], 128 * k)


def _planes(bits):
    """(first bit, width) of each plane of packed bits."""
    return [(sum(PLANES[bits][:i]), width) for i, width in enumerate(PLANES[bits])]


def _word(code, words, plane, first, width, coordinate):
    """Address of the word vector with the bits of ``coordinate`` (a multiple of 8) in a plane, and their place."""
    bit = code.times(coordinate, width)
    word = code.b.lshr(bit, ir.Constant(bit.type, 5))
    address = code.b.add(words, code.b.add(code.times(plane, first), code.times(word, 64)))
    return address, code.splat(code.b.trunc(code.b.and_(bit, ir.Constant(bit.type, 31)), _INT))


@_codelet("bits")
def quantize(code, z, pitch, unit, tables, sums, words, plane, coordinate, bits):
    """Codes of 8 coordinates of 16 blocks, from ``coordinate`` on: z * unit to the nearest level, one lane a block.

    Adds <|z|, |q|> and |q|^2 to sums [2, 16], and the packed bits to words, vectors of one lane a block that must be 0
    before. plane: bytes that one bit of width of a plane takes.
    """
    quantizer, scale = _Quantizer(code, bits, tables), code.load(unit)
    product = square = code.vector(0.0)
    packed: dict[tuple[int, int], _Vector] = {}
    surplus: dict[tuple[int, int], int] = {}
    for r in range(CHUNK):
        x = code.load(z, code.times(pitch, r))
        magnitude = (x.ints() & 0x7FFFFFFF).floats()
        index, q = quantizer(magnitude * scale)
        product, square = code.fma(magnitude, q, product), code.fma(q, q, square)
        # the levels are symmetric; zero itself has 2**(bits - 1) - 1 thresholds strictly below it
        index = code.select(x > 0.0, index, index ^ ((1 << bits) - 1))
        for first, width in _planes(bits):
            key, shift = (first, r * width // 32), r * width % 32
            part = index >> first
            if first + width < bits:
                part = part & ((1 << width) - 1)
            else:  # the exponent's bits pile up to a number known beforehand, cheaper to subtract once
                surplus[key] = surplus.get(key, 0) + ((_EXPONENT >> first) << shift)
            packed[key] = packed[key] + (part << shift) if key in packed else part << shift
    code.add_to(sums, product, square)
    for first, width in _planes(bits):
        address, shift = _word(code, words, plane, first, width, coordinate)
        for at in range(max(1, CHUNK * width // 32)):
            value = packed[first, at] + (-surplus.get((first, at), 0) & 0xFFFFFFFF)
            if CHUNK * width < 32:
                value = code.load(address, 0, _INTS) | _Vector(code, code.b.shl(value.value, shift.value))
            code.store(value, address, 64 * at)


def _levels(code, table_at, parts, bits):
    """Levels of 16 coordinates from the words of their planes; one look-up for each."""
    size = level_table_size(bits)
    table, levels = _Table(code, table_at, size), []
    for r in range(LANES):
        index = None
        for (first, width), v in zip(_planes(bits), parts, strict=True):
            part = v[r * width // 32] >> (r * width % 32)
            if first + width < bits:  # bits above the last plane's are ignored by the look-up
                part = part & ((1 << width) - 1)
            index = part if index is None else index | (part << first)
        if bits < SYMMETRIC:
            levels.append(table[index])
            continue
        # by the magnitude of the mirror image: half the table, half the look-up
        below = code.b.icmp_unsigned("==", (index & (1 << (bits - 1))).value, code.constant(0, _INTS))
        level = table[code.select(below, index ^ 0xFFFFFFFF, index)].ints()
        levels.append(code.select(below, level ^ 0x80000000, level).floats())
    return levels


def _four_indices(code, parts, bits):
    """The indices of 16 coordinates as the bytes of four vectors: [(vector, the coordinates of a lane's four bytes)].

    With 8 bits they lie so already; with 7 the planes of 4, 2 and 1 bits meet byte by byte.
    """
    if bits == 8:
        return [(v, [4 * i + k for k in range(4)]) for i, v in enumerate(parts[0])]
    (low, high), (pairs,), (single,) = parts
    even, odd = (code.shuffle_bytes(low, high, [k, k + 2, k + 4, k + 6]) for k in range(2))
    spread = code.shuffle_bytes(single, single >> 4, [0, 4, 1, 5])
    found = []
    for j in range(4):  # coordinates j, j + 4, j + 8, j + 12
        nibble = (odd if j >= 2 else even) >> 4 * (j % 2)
        two = pairs << 4 - 2 * j if j < 3 else pairs >> 2
        index = nibble & 0x0F0F0F0F | two & 0x30303030 | (spread << 6 - j) & 0x40404040
        found.append((index, [j + 4 * k for k in range(4)]))
    return found


def _levels_bytewise(code, table_at, parts, bits):
    """What ``_levels`` finds, 64 at a time: each byte of a level by one permute of what holds its plane."""
    size, b = level_table_size(bits), code.b
    tables = [
        [b.bitcast(code.read(table_at, 4 * size + at, _INTS), _BYTES) for at in range(p * size, (p + 1) * size, 64)]
        for p in range(4)
    ]
    name = {64: "permvar", 128: "vpermi2var"}[size]  # which ignore the higher bits of an index
    look_up = cgutils.get_or_insert_function(
        b.module, ir.FunctionType(_BYTES, [_BYTES] * (1 + size // 64)), f"llvm.x86.avx512.{name}.qi.512"
    )
    zeros, ones, top = (ir.Constant(_BYTES, [value] * 64) for value in (0, 255, 1 << (bits - 1)))
    levels: list[_Vector | None] = [None] * LANES
    for index, coordinates in _four_indices(code, parts, bits):
        flat = b.bitcast(index.value, _BYTES)
        below = b.icmp_unsigned("==", b.and_(flat, top), zeros)
        mirrored = b.select(below, b.xor(flat, ones), flat)
        found = [
            _Vector(code, b.bitcast(b.call(look_up, [registers[0], mirrored, *registers[1:]]), _INTS))
            for registers in tables
        ]
        sign = (index ^ 0xFFFFFFFF) << (8 - bits)
        found[3] = found[3] | sign & 0x80808080
        # four bytes of a level side by side: words of two planes, then both words
        pairs = [[code.shuffle_bytes(found[p], found[p + 1], [k, k + 4, k + 1, k + 5]) for p in (0, 2)] for k in (0, 2)]
        for (lower, upper), k in zip(pairs, (0, 2), strict=True):
            for half in range(2):
                level = code.shuffle_bytes(lower, upper, [2 * half, 2 * half + 1, 2 * half + 4, 2 * half + 5])
                levels[coordinates[k + half]] = level.floats()
    return levels


@_codelet("bits", "steps")
def dequantize(code, words, plane, tile, levels, z, pitch, bits, steps):
    """Levels of 16 coordinates of 16 blocks, from ``tile`` * 16 on, from packed words into z, then ``steps``."""
    parts = []
    for first, width in _planes(bits):
        address, shift = _word(code, words, plane, first, width, code.times(tile, LANES))
        v = [code.load(address, 64 * i, _INTS) for i in range(max(1, LANES * width // 32))]
        if LANES * width < 32:
            v = [_Vector(code, code.b.lshr(x.value, shift.value)) for x in v]
        parts.append(v)
    look_up = _levels_bytewise if code.byte_permutes and bits >= SYMMETRIC else _levels
    for r, x in enumerate(_steps(code, look_up(code, levels, parts, bits), None, steps)):
        code.store(x, z, code.times(pitch, r))


@_codelet("kind", "radix")
def butterflies_store(code, z, signs, scale, limit, out, kind, radix):
    """Row order: butterflies across vectors, times signs and scale, clamped to ±limit, to the output's type."""
    scale, high = code.splat(scale), code.splat(limit)
    low = code.splat(code.b.fneg(limit))
    v = code.butterflies([code.load(z, 64 * i) for i in range(radix)])
    for i, x in enumerate(v):
        y = (x.ints() ^ code.load(signs, 64 * i, _INTS)).floats() * scale
        y = code.select(y > high, high, y)  # both comparisons are false for NaN, which therefore passes
        y = code.select(low > y, low, y)
        code.store_from_fp32(kind, y, out, i * LANES * _SIZE[kind])


@_codelet("size")
def store_words(code, words, keep, payload, width, size):
    """Writes ``size`` of the word vectors as that many words of 16 rows ``width`` bytes apart; 0 for lanes not kept."""
    mask = code.load(keep, 0, _INTS)
    v = [(code.load(words, 64 * i, _INTS) & mask).floats() for i in range(size)]
    v += [_Vector(code, ir.Constant(_FLOATS, ir.Undefined))] * (LANES - size)
    lanes = ir.Constant(ir.VectorType(_INT, size), list(range(size)))
    for r, x in enumerate(code.transpose(v)):
        value = code.b.shuffle_vector(x.ints().value, ir.Constant(_INTS, ir.Undefined), lanes)
        pointer = code.at(payload, code.times(width, r), value.type)
        code.b.store(value, pointer, align=1)


@_codelet("size")
def load_words(code, payload, width, words, size):
    """Inverse of ``store_words``."""
    v = []
    for r in range(LANES):
        part = code.read(payload, code.times(width, r), ir.VectorType(_INT, size))
        lanes = ir.Constant(_INTS, [min(lane, size - 1) for lane in range(LANES)])
        whole = code.b.shuffle_vector(part, ir.Constant(part.type, ir.Undefined), lanes)
        v.append(_Vector(code, whole).floats())
    for i, x in enumerate(code.transpose(v)[:size]):
        code.store(x.ints(), words, 64 * i)
