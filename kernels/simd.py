"""Straight-line vector code for the CPU kernels: Numba intrinsics that work on 16 fp32 lanes at a time.

Numba's own loops leave the shuffles of a Walsh-Hadamard transform and the table look-ups of a quantizer to the
compiler, which finds neither. Here each *codelet* writes the instructions of 16 to 64 vectors one after the other, in
LLVM's portable vector types: AVX-512 executes them as they are, other machines in halves or quarters. Only the table
look-up names instructions (the permutes of AVX-512 and AVX2) and has a portable form beside them. No loops, no calls,
no memory but what the addresses point to; every address is an integer, and alignment is not assumed.

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
INTEGER_BITS = 4  # up to which trials of the search over scales are judged in integers
STEPS = 32  # of a unit, in such a trial
SYMMETRIC = 7  # bits from which the decoder looks up magnitudes and sets the sign; bytewise where permutes allow it
_EXPONENT = (
    0x4B000000  # the bits of 2.0**23: added to a number below 2**22 it leaves the rounded integer in the low ones
)

_MULTIPLIERS, _WEYL = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)  # Philox's

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
        self.permutes = "+avx2" in features and not self.wide_permutes  # of eight lanes
        self.wide_bytes, self.dot_products = "+avx512bw" in features, "+avx512vnni" in features

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

    def splat(self, scalar: ir.Value, lanes: int = LANES) -> _Vector:
        vector_type = ir.VectorType(scalar.type, lanes)
        first = self.b.insert_element(ir.Constant(vector_type, ir.Undefined), scalar, ir.Constant(_INT, 0))
        zeros = ir.Constant(ir.VectorType(_INT, lanes), [0] * lanes)
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

    def philox(self, counter: list[_Vector], seed: ir.Value) -> list[_Vector]:
        """Four random words for each lane's counter of four words: see ``tq.quant.rotation.philox``.

        The even lanes, then the odd ones, in lanes of 64 bits, whose upper halves may hold anything: the product that a
        machine has, of 32 bits by 32, leaves a word of the result on either side and looks at the lower words alone.
        """
        b, longs = self.b, ir.VectorType(ir.IntType(64), LANES // 2)
        half, low = (ir.Constant(longs, [n] * (LANES // 2)) for n in (32, 0xFFFFFFFF))
        pairs = [b.bitcast(word.value, longs) for word in counter]
        even = self._philox_rounds([b.and_(word, low) for word in pairs], seed)
        odd = self._philox_rounds([b.lshr(word, half) for word in pairs], seed)
        found = (b.or_(b.and_(x, low), b.shl(y, half)) for x, y in zip(even, odd, strict=True))
        return [_Vector(self, b.bitcast(word, _INTS)) for word in found]

    def _philox_rounds(self, counter: list[ir.Value], seed: ir.Value) -> list[ir.Value]:
        """The words in the lower halves of 64-bit lanes."""
        b, longs = self.b, counter[0].type
        half, low = (ir.Constant(longs, [n] * longs.count) for n in (32, 0xFFFFFFFF))
        keys = [b.and_(seed, ir.Constant(seed.type, 0xFFFFFFFF)), b.lshr(seed, ir.Constant(seed.type, 32))]
        x, y, z, w = counter
        for _ in range(10):
            p, q = (
                b.mul(b.and_(word, low), ir.Constant(longs, [factor] * longs.count))
                for word, factor in zip((x, z), _MULTIPLIERS, strict=True)
            )
            first, second = (self.splat(key, longs.count).value for key in keys)
            x, y, z, w = (
                b.xor(b.xor(b.lshr(q, half), y), first), q, b.xor(b.xor(b.lshr(p, half), w), second), p,
            )  # fmt: skip
            keys = [b.add(key, ir.Constant(key.type, weyl)) for key, weyl in zip(keys, _WEYL, strict=True)]
        return [x, y, z, w]

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
    """``size`` fp32 entries at an address, looked up by the low bits of 16 indices at a time.

    period: entries after which they repeat.
    """

    def __init__(self, code: _Code, address: ir.Value, size: int, period: int) -> None:
        self.code, self.address, self.size = code, address, size
        self.eights = max(1, period // 8)  # registers of AVX2 that hold a period
        if code.wide_permutes:
            self.parts = [code.load(address, 64 * i) for i in range(size // LANES)]

    def __getitem__(self, index: _Vector) -> _Vector:
        b = self.code.b
        if self.code.permutes and self.eights <= 4:
            return self._by_eights(index)
        if not self.code.wide_permutes:
            value = ir.Constant(_FLOATS, ir.Undefined)
            masked = (index & (self.size - 1)).value
            for lane in range(LANES):
                at = b.zext(b.extract_element(masked, ir.Constant(_INT, lane)), ir.IntType(64))
                entry = self.code.read(self.address, b.shl(at, ir.Constant(at.type, 2)), _FLOAT)
                value = b.insert_element(value, entry, ir.Constant(_INT, lane))
            return _Vector(self.code, value)
        if self.size == LANES:
            return self.code.call("llvm.x86.avx512.permvar.sf.512", self.parts[0], index)
        pair = "llvm.x86.avx512.vpermi2var.ps.512"
        found = [
            self.code.call(pair, low, index, high) for low, high in zip(self.parts[::2], self.parts[1::2], strict=True)
        ]
        bit = 2 * LANES
        while len(found) > 1:  # the higher bits of the index choose among the pairs of registers
            mask = b.icmp_unsigned("!=", (index & bit).value, ir.Constant(_INTS, [0] * LANES))
            found = [self.code.select(mask, high, low) for low, high in zip(found[::2], found[1::2], strict=True)]
            bit *= 2
        return found[0]

    def _by_eights(self, index: _Vector) -> _Vector:
        """By permutes of eight lanes, which look at the lowest three bits; the next ones choose among registers."""
        b, eight = self.code.b, ir.VectorType(_INT, 8)
        floats = ir.VectorType(_FLOAT, 8)
        parts = [self.code.read(self.address, 32 * i, floats) for i in range(self.eights)]
        permute = cgutils.get_or_insert_function(
            b.module, ir.FunctionType(floats, [floats, eight]), "llvm.x86.avx2.permps"
        )
        halves = []
        for start in (0, 8):
            lanes = ir.Constant(eight, list(range(start, start + 8)))
            own = b.shuffle_vector(index.value, ir.Constant(_INTS, ir.Undefined), lanes)
            found, bit = [b.call(permute, [part, own]) for part in parts], 8
            while len(found) > 1:
                set_ = b.icmp_unsigned("!=", b.and_(own, ir.Constant(eight, [bit] * 8)), ir.Constant(eight, [0] * 8))
                found = [b.select(set_, high, low) for low, high in zip(found[::2], found[1::2], strict=True)]
                bit *= 2
            halves.append(found[0])
        return _Vector(self.code, b.shuffle_vector(*halves, ir.Constant(_INTS, list(range(LANES)))))


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


@_codelet()
def raise_to(code, address, value):
    """The int64 at an address becomes ``value`` where that is greater, atomically."""
    code.b.atomic_rmw("max", code.at(address, 0, ir.IntType(64)), value, "monotonic")


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


@_codelet("use", "kind")
def dither(code, seed, run, use, target, kind):
    """The 128 numbers of run number ``run`` of ``tq.quant.rotation.dither``, int32.

    With kind FP32 as fp32 numbers uniform in (0, 1): halfway between two of 2**16 steps.
    """
    b, long = code.b, ir.IntType(64)
    lanes = ir.Constant(ir.VectorType(long, LANES), list(range(LANES)))
    at = b.add(code.splat(b.mul(run, ir.Constant(long, LANES))).value, lanes)
    upper = b.lshr(at, ir.Constant(at.type, [32] * LANES))
    counter = [_Vector(code, b.trunc(at, _INTS)), _Vector(code, b.trunc(upper, _INTS))]
    words = code.philox([*counter, code.vector(0, _INTS), code.vector(use, _INTS)], seed)
    for i, word in enumerate(words):
        for j, half in enumerate((word & 0xFFFF, word >> 16)):
            if kind == FP32:
                half = (_Vector(code, b.sitofp(half.value, _FLOATS)) + 0.5) * code.vector(2.0**-16)
            code.store(half, target, 128 * i + 64 * j)


@_codelet("kind")
def narrow(code, source, kind, target):
    """16 numbers of fp32 to the nearest elements, ties to even."""
    code.store_from_fp32(kind, code.load(source), target, 0)


@_codelet()
def narrow_at_random(code, source, dither, target):
    """16 numbers of fp32 to bf16, up or down by int32 ``dither`` in [0, 2**16); what is not finite to the nearest."""
    x = code.load(source)
    bits = x.ints()
    finite = code.b.icmp_unsigned("!=", (bits & 0x7F800000).value, code.constant(0x7F800000, _INTS))
    code.store_from_fp32(BF16, x, target, 0)
    nearest = _Vector(code, code.b.zext(code.read(target, 0, _SHORTS), _INTS))
    rounded = code.select(finite, (bits + code.load(dither, 0, _INTS)) >> 16, nearest)
    code.store(_Vector(code, code.b.trunc(rounded.value, _SHORTS)), target)


@_codelet("count")
def log_range(code, v, bounds, count):
    """Extends ``bounds``, int64 [2]: the least bits that are not 0, and the greatest."""
    b, long = code.b, ir.IntType(64)
    low, high = code.vector(0x7F800000, _INTS), code.vector(0x80000000, _INTS)
    for i in range(count):
        place = code.load(v, 64 * i, _INTS)
        zero = code.b.icmp_unsigned("==", place.value, code.constant(0, _INTS))
        low = code.call("llvm.smin.v16i32", low, code.select(zero, code.vector(0x7F800000, _INTS), place))
        high = code.call("llvm.smax.v16i32", high, place)
    for name, vector, offset in (("smin", low, 0), ("smax", high, 8)):
        lanes = cgutils.get_or_insert_function(
            b.module, ir.FunctionType(_INT, [_INTS]), f"llvm.vector.reduce.{name}.v16i32"
        )
        found, old = b.sext(b.call(lanes, [vector.value]), long), code.read(bounds, offset, long)
        extends = b.icmp_signed("<" if name == "smin" else ">", found, old)
        b.store(b.select(extends, found, old), code.at(bounds, offset, long))


def _log_level(code, low, width, index):
    """The level of number ``index`` (fp32) of a block whose lowest has the bits ``low``."""
    return (low + _Vector(code, code.b.fptosi((index * width).value, _INTS))).floats()


@_codelet("kind", "count")
def largest(code, x, bits, kind, count):
    """Extends ``bits``, int64: the greatest magnitude of 16 * ``count`` elements, as its bits."""
    b, long, half = code.b, ir.IntType(64), kind in (BF16, FP16)
    type_, mask = (_SHORTS, 0x7FFF) if half else (_INTS, 0x7FFFFFFF)
    best = None
    for i in range(count):
        magnitude = _Vector(code, code.read(x, i * LANES * _SIZE[kind], type_)) & mask
        best = magnitude if best is None else code.call(f"llvm.umax.v16i{16 if half else 32}", best, magnitude)
    lanes = cgutils.get_or_insert_function(
        b.module, ir.FunctionType(type_.element, [type_]), f"llvm.vector.reduce.umax.v16i{16 if half else 32}"
    )
    found, old = b.zext(b.call(lanes, [best.value]), long), code.read(bits, 0, long)
    b.store(b.select(b.icmp_signed(">", found, old), found, old), code.at(bits, 0, long))


@_codelet("bits", "count")
def log_encode(code, v, chances, low, width, target, bits, count):
    """Codes of 16 * ``count`` numbers, packed; see ``tq.quant.reference.log_encode``. chances: uniform in (0, 1)."""
    b, top = code.b, float((1 << bits) - 2)
    inverse = code.splat(b.fdiv(ir.Constant(_FLOAT, 1.0), width))
    low, width = code.splat(b.trunc(low, _INT)), code.splat(width)
    zeros, one = code.constant(0, _INTS), code.vector(1.0)
    for i in range(count):
        x = code.load(v, 64 * i)
        place = x.ints()
        above = _Vector(code, b.sitofp(b.sub(place.value, low.value), _FLOATS))
        below = code.call("llvm.floor.v16f32", above * inverse)
        below = code.select(below > 0.0, below, code.vector(0.0))
        below = code.select(below > top, code.vector(top), below)
        lower = _log_level(code, low, width, below)
        gap = _log_level(code, low, width, below + one) - lower
        up = (x - lower) > code.load(chances, 64 * i) * gap
        index = below + one + code.select(up, one, code.vector(0.0))
        index = b.fptosi(index.value, _INTS)  # below 2**8, and signed it is one instruction
        index = b.select(b.icmp_unsigned("==", place.value, zeros), zeros, index)
        packed = b.trunc(index, ir.VectorType(ir.IntType(8), LANES))
        if bits < 8:  # neighbours meet in one byte
            parts = 8 // bits
            words = ir.VectorType(ir.IntType(8 * parts), LANES // parts)
            wide = whole = b.bitcast(packed, words)
            for part in range(1, parts):
                whole = b.or_(whole, b.lshr(wide, ir.Constant(words, [part * (8 - bits)] * words.count)))
            packed = b.trunc(whole, ir.VectorType(ir.IntType(8), words.count))
        code.b.store(packed, code.at(target, 2 * bits * i, packed.type), align=1)


@_codelet("bits", "count")
def log_decode(code, codes, low, width, target, bits, count):
    """Levels of 16 * ``count`` codes; see ``tq.quant.reference.log_decode``."""
    b, parts = code.b, 8 // bits
    low, width = code.splat(b.trunc(low, _INT)), code.splat(width)
    lanes = ir.Constant(_INTS, [lane // parts for lane in range(LANES)])
    shifts = ir.Constant(_INTS, [lane % parts * bits for lane in range(LANES)])
    for i in range(count):
        packed = code.read(codes, 2 * bits * i, ir.VectorType(ir.IntType(8), LANES // parts))
        if parts > 1:
            packed = b.shuffle_vector(packed, ir.Constant(packed.type, ir.Undefined), lanes)
        index = _Vector(code, b.zext(packed, _INTS))
        if parts > 1:
            index = _Vector(code, b.lshr(index.value, shifts)) & ((1 << bits) - 1)
        zero = b.icmp_unsigned("==", index.value, code.constant(0, _INTS))
        lowered = _Vector(code, b.sitofp((index + 0xFFFFFFFF).value, _FLOATS))
        level = _log_level(code, low, width, lowered)
        code.store(code.select(zero, code.vector(0.0), level), target, 64 * i)


@_codelet("count")
def adamw(code, p, g, m, v, constants, count):
    """AdamW's update of 16 * ``count`` fp32 numbers in place, rounded as PyTorch's operations round.

    constants: fp32 weight of the gradient in m, its factor in v, beta2, what decay leaves of p, minus the step's size,
    the root of v's bias correction, eps.
    """
    b = code.b
    w, c, beta2, left, size, correction, eps = (
        code.splat(code.read(constants, 4 * i, _FLOAT)) for i in range(7)
    )  # fmt: skip
    small = b.fcmp_ordered("<", code.read(constants, 0, _FLOAT), ir.Constant(_FLOAT, 0.5))
    coefficient = _Vector(code, b.select(small, w.value, (w - code.vector(1.0)).value))
    for i in range(count):
        x, gradient, first, second = (code.load(address, 64 * i) for address in (p, g, m, v))
        base = _Vector(code, b.select(small, first.value, gradient.value))  # ``lerp`` starts from the nearer end
        first = code.fma(coefficient, gradient - first, base)
        second = code.fma(c * gradient, gradient, second * beta2)
        root = _Vector(code, b.fdiv(code.call("llvm.sqrt.v16f32", second).value, correction.value)) + eps
        x = x * left + _Vector(code, b.fdiv((size * first).value, root.value))
        for vector, address in ((x, p), (first, m), (second, v)):
            code.store(vector, address, 64 * i)


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
        self.thresholds = _Table(code, tables, size, self.half)
        self.magnitudes = _Table(code, code.b.add(tables, ir.Constant(tables.type, 4 * size)), size, self.half)
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


_STEP_BYTES = 64  # of a vector of magnitudes in steps: of 16 blocks 4 coordinates each
TRIAL_BYTES = 176  # of a trial for ``try_steps``: 16 cuts by cell, 16 counts, 16 for all cuts, 128 levels


@_codelet("bits")
def to_steps(code, z, pitch, unit, target, bits):
    """Magnitudes of a tile, 16 coordinates of 16 blocks, as bytes: |z| * unit rounded, at most 127.

    Four coordinates to a lane, lowest first. Nothing where ``bits`` says that trials are not judged in integers.
    """
    if bits > INTEGER_BITS:
        return
    scale, top = code.load(unit), code.vector(2.0**23 + 127)
    for i in range(4):
        packed = None
        for j in range(4):
            magnitude = (code.load(z, code.times(pitch, 4 * i + j)).ints() & 0x7FFFFFFF).floats()
            steps = code.fma(magnitude, scale, code.vector(2.0**23))
            steps = code.select(steps > top, top, steps).ints()  # a NaN stays one, in a block that is not coded
            part = steps ^ _EXPONENT if j == 0 else steps << 8 * j  # further up the exponent's bits are shifted out
            packed = part if packed is None else packed | part
        code.store(packed & 0x7F7F7F7F, target, _STEP_BYTES * i)


class _Steps:
    """Vectors of bytes: one register of AVX2 or of AVX-512 wide."""

    def __init__(self, code):
        self.code, self.width = code, 64 if code.wide_bytes else 32
        self.bytes, self.shorts, self.ints = (
            ir.VectorType(ir.IntType(8 * size), self.width // size) for size in (1, 2, 4)
        )
        wide = self.width == 64
        self.names = {
            "shuffle": "llvm.x86.avx512.pshuf.b.512" if wide else "llvm.x86.avx2.pshuf.b",
            "bytes": "llvm.x86.avx512.pmaddubs.w.512" if wide else "llvm.x86.avx2.pmadd.ub.sw",
            "shorts": "llvm.x86.avx512.pmaddw.d.512" if wide else "llvm.x86.avx2.pmadd.wd",
        }

    def splat(self, value, type_):
        return ir.Constant(type_, [value] * type_.count)

    def quarters(self, address, offset):
        """16 bytes in each quarter of a register."""
        b, part = self.code.b, self.code.read(address, offset, ir.VectorType(ir.IntType(8), 16))
        lanes = ir.Constant(ir.VectorType(_INT, self.width), list(range(16)) * (self.width // 16))
        return b.shuffle_vector(part, ir.Constant(part.type, ir.Undefined), lanes)

    def call(self, name, result, *arguments):
        b = self.code.b
        type_ = ir.FunctionType(result, [x.type for x in arguments])
        return b.call(cgutils.get_or_insert_function(b.module, type_, self.names[name]), arguments)


@_codelet("bits", "count")
def try_steps(code, steps, table, trials, sums, bits, count):
    """What 32 coordinates of 16 blocks, as ``to_steps`` left them, have in common with their levels in integers.

    Adds <a, q> and |q|^2 to sums, int32 [count, 2, 16], for ``count`` trials. table: the levels; trials: the rows of
    the first of them, for each the cut in every cell of 8 steps, the number of cuts below it, all cuts, and the levels
    of all magnitudes.
    """
    if bits > INTEGER_BITS:
        return
    if code.byte_permutes and code.dot_products:
        _try_steps_by_tables(code, steps, trials, sums, count)
        return
    if not (code.permutes or code.wide_bytes):
        _try_steps_by_comparing(code, steps, table, trials, sums, bits, count)
        return
    b, v = code.b, _Steps(code)
    levels = v.quarters(table, 0)
    rows = [(v.quarters(trials, TRIAL_BYTES * k), v.quarters(trials, TRIAL_BYTES * k + 16)) for k in range(count)]
    ones, low = v.splat(1, v.shorts), v.splat(15, v.bytes)
    for part in range(0, _STEP_BYTES, v.width):
        totals = [[None, None] for _ in range(count)]
        pending = [[None, None] for _ in range(count)]
        for i in range(8):
            a = code.read(steps, _STEP_BYTES * i + part, v.bytes)
            cells = b.lshr(b.bitcast(a, v.shorts), v.splat(3, v.shorts))
            cells = b.and_(b.bitcast(cells, v.bytes), low)
            for k, (cuts, counts) in enumerate(rows):
                cut, index = (v.call("shuffle", v.bytes, row, cells) for row in (cuts, counts))
                above = b.sext(b.icmp_signed(">", a, cut), v.bytes)
                q = v.call("shuffle", v.bytes, levels, b.sub(index, above))
                for place, (first, often) in enumerate(((a, 2), (q, 4))):  # sums that 16 bits hold
                    product = v.call("bytes", v.shorts, first, q)
                    before = pending[k][place]
                    pending[k][place] = product if before is None else b.add(before, product)
                    if i % often == often - 1:
                        wide = v.call("shorts", v.ints, pending[k][place], ones)
                        before = totals[k][place]
                        totals[k][place] = wide if before is None else b.add(before, wide)
                        pending[k][place] = None
        for k in range(count):
            for place, total in enumerate(totals[k]):
                at = 128 * k + 64 * place + part
                code.b.store(b.add(code.read(sums, at, v.ints), total), code.at(sums, at, v.ints), align=1)


def _try_steps_by_tables(code, steps, trials, sums, count):
    """The same with one permute for the levels of 64 magnitudes, and products that add themselves up."""
    b = code.b
    look_up = cgutils.get_or_insert_function(
        b.module, ir.FunctionType(_BYTES, [_BYTES] * 3), "llvm.x86.avx512.vpermi2var.qi.512"
    )
    tables = [[code.read(trials, TRIAL_BYTES * k + 48 + at, _BYTES) for at in (0, 64)] for k in range(count)]
    totals = [[code.load(sums, 128 * k + at, _INTS) for at in (0, 64)] for k in range(count)]
    for i in range(8):
        a = code.load(steps, _STEP_BYTES * i, _INTS)
        for (low, high), total in zip(tables, totals, strict=True):
            q = _Vector(code, b.bitcast(b.call(look_up, [low, b.bitcast(a.value, _BYTES), high]), _INTS))
            total[:] = (code.call("llvm.x86.avx512.vpdpbusd.512", t, x, q) for t, x in zip(total, (a, q), strict=True))
    for k, total in enumerate(totals):
        for at, vector in zip((0, 64), total, strict=True):
            code.store(vector, sums, 128 * k + at)


def _try_steps_by_comparing(code, steps, table, trials, sums, bits, count):
    """The same in vectors of any machine."""
    b, half = code.b, 1 << (bits - 1)

    def number(address, offset):
        return code.splat(b.zext(code.read(address, offset, ir.IntType(8)), _INT))

    levels = [number(table, i) for i in range(half)]
    rises = [_Vector(code, b.sub(high.value, low.value)) for low, high in zip(levels, levels[1:], strict=False)]
    for k in range(count):
        cuts = [number(trials, TRIAL_BYTES * k + 32 + i) for i in range(half - 1)]
        for i in range(8):
            packed = code.load(steps, _STEP_BYTES * i, _INTS)
            for j in range(4):
                a, q = (packed >> 8 * j) & 0xFF, levels[0]
                for cut, rise in zip(cuts, rises, strict=True):
                    above = b.icmp_unsigned(">", a.value, cut.value)
                    q = q + code.select(above, rise, code.vector(0, _INTS))
                for place, first in enumerate((a, q)):
                    at = 128 * k + 64 * place
                    product = _Vector(code, b.mul(first.value, q.value))
                    code.store(code.load(sums, at, _INTS) + product, sums, at)


@_codelet("bits")
def judge(code, sums, multiplier, best, least, bits):
    """Where the cosine by sums int32 [2, 16] is the largest so far, ``best`` becomes the multiplier at an address."""
    if bits > INTEGER_BITS:
        return
    dot, square = (_Vector(code, code.b.sitofp(code.read(sums, 64 * i, _INTS), _FLOATS)) for i in range(2))
    cosine = _Vector(code, code.b.fdiv((dot * dot).value, square.value))
    better = cosine > code.load(least)
    code.store(code.select(better, code.splat(code.read(multiplier, 0, _FLOAT)), code.load(best)), best)
    code.store(code.select(better, cosine, code.load(least)), least)


@_codelet("bits", "count")
def try_scales(code, z, pitch, units, tables, sums, bits, count):
    """What 8 coordinates of 16 blocks lose when u = |z| * unit is quantized, for ``count`` rows of units [count, 16].

    Adds |u - q|^2 and <u, u - q> to sums [count, 2, 16]. Nothing where trials are judged in integers.
    """
    if bits <= INTEGER_BITS:
        return
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
    table, levels = _Table(code, table_at, size, min(size, 1 << bits)), []
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
