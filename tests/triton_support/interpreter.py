"""Fixes Triton's NumPy interpreter, so that a kernel on CPU tensors computes the numbers of a GPU or raises an error.

`install()` changes Triton for the life of the process, which must have been started with TRITON_INTERPRET=1. Each function
below fixes one defect, and says in which of Triton 3.6.0 and 3.9.0 it was seen.

Exact are the operands of a dot (bf16, fp16, or fp32 cut to tf32 unless `input_precision` differs), products accumulated in
fp32, and every single operation on bf16, rounded to nearest, ties to even. An H100 with Triton 3.6 gave the same bits for
single operations and conversions, and cuts to tf32 in the same way.

Not exact, because a GPU leaves them open too, are the order of additions in a dot, a sum or a scan, the last bits of exp and
similar functions, and whether `x * y + z` is fused (7 of 256 bf16 differed by that on the H100).

Refused are float8, `dot_scaled`, rounding modes other than to nearest and towards zero, inline assembly, libdevice, a block
used as a truth value, and an access outside the tensors given to the kernel.
"""

import ast
import functools
import os
import sys

import numpy as np
import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter
from triton.runtime.autotuner import Autotuner
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, ReduceOps, ScanOps, TensorHandle

HALVES = (tl.float16, tl.bfloat16)
FLOATS = (*HALVES, tl.float32, tl.float64)
NAN_BF16 = np.uint16(0x7FFF)


@functools.cache
def install() -> None:
    """Fixes the interpreter of this process."""
    if os.environ.get('TRITON_INTERPRET') != '1' or not triton.knobs.runtime.interpret:
        raise RuntimeError('start Python with TRITON_INTERPRET=1: kernels choose between compiler and interpreter on import')
    _compute_bf16()
    _convert_floats()
    _dot()
    _atomics()
    _reduce_and_scan()
    _guard_memory()
    _rewrite_kernels()
    _take_first_config()
    _patch_language_once()


# Numbers


def widen(bits: np.ndarray) -> np.ndarray:
    """Converts bf16, which the interpreter stores as uint16 because NumPy has no bf16, to float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrow(values: np.ndarray, to_nearest: bool = True) -> np.ndarray:
    """Converts numbers to bf16, rounded once: to nearest, ties to even, or towards zero."""
    single = np.ascontiguousarray(values, dtype=np.float32)
    if values.dtype.itemsize > 4 or values.dtype.kind in 'iu':
        # First to float32, rounded to odd, so that the second rounding gives the result of a single one.
        exact = np.asarray(values, dtype=np.float64)
        single = np.where(np.abs(single) > np.abs(exact), np.nextafter(single, np.float32(0)), single)
        bits = single.view(np.uint32) | (single != exact)
    else:
        bits = single.view(np.uint32)
    if to_nearest:
        bits = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return np.where(np.isnan(single), NAN_BF16, (bits >> np.uint32(16)).astype(np.uint16))


def cut_to_tf32(values: np.ndarray) -> np.ndarray:
    """Returns the upper 19 bits of each float32, which a tensor core reads. Triton 3.6 and 3.9 do not round before."""
    return (np.ascontiguousarray(values).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def is_bf16(handle: object) -> bool:
    return isinstance(handle, TensorHandle) and handle.dtype.scalar == tl.bfloat16 and handle.data.dtype == np.uint16


def to_float32(handle: object) -> object:
    return TensorHandle(widen(handle.data), tl.float32) if is_bf16(handle) else handle


# Builder functions that move bits without computing, or that are fixed separately.
_MOVES_BITS = {
    *('load', 'store', 'masked_load', 'masked_store', 'tensor_pointer_load', 'tensor_pointer_store'),
    *('descriptor_load', 'descriptor_store', 'descriptor_gather', 'descriptor_scatter', 'make_tensor_descriptor'),
    *('atomic_load', 'atomic_store', 'atomic_poll', 'atomic_cas', 'atomic_rmw'),
    *('bitcast', 'int_to_ptr', 'ptr_to_int', 'addptr', 'make_block_ptr', 'advance'),
    *('reshape', 'trans', 'gather', 'expand_dims', 'broadcast', 'cat', 'join', 'split', 'splat', 'unsplat', 'select'),
    *('si_to_fp', 'ui_to_fp', 'fp_to_si', 'fp_to_ui', 'fp_ext', 'fp_trunc', 'int_cast', 'fp_to_fp'),
    *('dot', 'dot_scaled', 'fma'),
}


def _compute_bf16() -> None:
    """3.6, 3.9: arithmetic and comparisons silently treat the bits of a bf16 as an integer.

    The fix computes in float32 and rounds. `+ - * /` and sqrt are then correctly rounded, because 24 bits are enough to
    make two roundings to 8 bits equal to one. It covers every function that is not listed as moving bits only, and so new
    functions of a later Triton too."""

    def computes(stock):
        @functools.wraps(stock)
        def create(self, *args):
            if not any(map(is_bf16, args)):
                return stock(self, *args)
            result = stock(self, *map(to_float32, args))
            if isinstance(result, TensorHandle) and result.data.dtype == np.float32:
                return TensorHandle(narrow(result.data), tl.bfloat16)
            return result

        return create

    for name in dir(InterpreterBuilder):
        if name.startswith('create_') and name.removeprefix('create_') not in _MOVES_BITS:
            setattr(InterpreterBuilder, name, computes(getattr(InterpreterBuilder, name)))

    stock_fma = InterpreterBuilder.create_fma

    def create_fma(self, x, y, z):
        if not is_bf16(z):
            return stock_fma(self, x, y, z)
        x, y, z = (widen(h.data).astype(np.float64) for h in (x, y, z))
        return TensorHandle(narrow(x * y + z), tl.bfloat16)

    InterpreterBuilder.create_fma = create_fma

    def get_bf16(self, value):  # missing in 3.6, so that `tl.full(..., tl.bfloat16)` and `other=0.0` fail
        return TensorHandle(narrow(np.array([value], np.float64)), tl.bfloat16)

    InterpreterBuilder.get_bf16 = get_bf16


def _convert_floats() -> None:
    """3.6, 3.9: conversion to bf16 truncates; between bf16 and types other than float32 it uses the bits as a number."""

    def cast_impl(self, source, target):
        target = target.scalar
        if not all(t in FLOATS for t in (source.dtype.scalar, target) if t.is_floating()):
            raise NotImplementedError(f'{source.dtype} to {target}: the interpreter does not round float8 as a GPU does')
        data = to_float32(source).data
        if target == tl.bfloat16:
            return source if is_bf16(source) else TensorHandle(narrow(data), target)
        return TensorHandle(data.astype(interpreter._get_np_dtype(target)), target)

    def create_fp_to_fp(self, source, target, rounding):
        if rounding == ir.ROUNDING_MODE.RTZ and (source.dtype.scalar, target.scalar) == (tl.float32, tl.bfloat16):
            return TensorHandle(narrow(source.data, to_nearest=False), tl.bfloat16)
        if rounding not in (None, ir.ROUNDING_MODE.RTNE):
            raise NotImplementedError(f'{source.dtype} to {target} with {rounding}')
        return cast_impl(self, source, target)

    InterpreterBuilder.cast_impl = cast_impl
    InterpreterBuilder.create_fp_to_fp = create_fp_to_fp


def _dot() -> None:
    """3.6, 3.9: a dot of bf16 multiplies the bits as integers (errors of 1e10). A dot of float32 is exact for any
    `input_precision`, while a GPU reads tf32 by default. A dot with an fp16 result accumulates in fp16."""

    def product(a, b):
        return np.matmul(a, b, dtype=np.float32)

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        kinds = {a.dtype.scalar, b.dtype.scalar}
        if not kinds <= {*FLOATS, tl.int8, tl.uint8}:
            raise NotImplementedError(f'dot of {a.dtype} and {b.dtype}')
        if kinds & {tl.float64, tl.int8, tl.uint8}:
            return stock(self, a, b, d, input_precision, max_num_imprecise_acc)
        x, y = to_float32(a).data, to_float32(b).data
        if kinds == {tl.float32} and input_precision == ir.INPUT_PRECISION.TF32:
            total = product(cut_to_tf32(x), cut_to_tf32(y))
        elif kinds == {tl.float32} and input_precision == ir.INPUT_PRECISION.TF32x3:
            big_x, big_y = cut_to_tf32(x), cut_to_tf32(y)
            total = product(cut_to_tf32(x - big_x), big_y) + product(big_x, cut_to_tf32(y - big_y)) + product(big_x, big_y)
        else:
            total = product(x, y)
        return TensorHandle((total + d.data).astype(d.data.dtype), d.dtype.scalar)

    def create_dot_scaled(self, *args):
        raise NotImplementedError('dot_scaled in the interpreter')

    stock = InterpreterBuilder.create_dot
    InterpreterBuilder.create_dot = create_dot
    InterpreterBuilder.create_dot_scaled = create_dot_scaled


def _atomics() -> None:
    """3.6, 3.9: atomic_add of bf16 fails ('unsupported data type'). Lanes are added one by one: they may share addresses."""
    stock = InterpreterBuilder.create_atomic_rmw

    def create_atomic_rmw(self, operation, pointer, value, mask, *rest):
        _memory.check(pointer, mask.data)
        if not is_bf16(value):
            return stock(self, operation, pointer, value, mask, *rest)
        if operation != ir.ATOMIC_OP.FADD:
            raise NotImplementedError(f'{operation} of bf16')
        pointers, values, masks = np.broadcast_arrays(pointer.data, widen(value.data), mask.data)
        before = np.zeros(values.shape, np.uint16)
        for lane in np.ndindex(values.shape):
            if masks[lane]:
                address = TensorHandle(pointers[lane].reshape(1), pointer.dtype)
                old = self.create_load(address, *[None] * _CACHE_ARGUMENTS, False)
                before[lane] = old.data[0]
                new = TensorHandle(narrow(widen(old.data) + values[lane]), tl.bfloat16)
                self.create_store(address, new, *[None] * _CACHE_ARGUMENTS)
        return TensorHandle(before, tl.bfloat16)

    InterpreterBuilder.create_atomic_rmw = create_atomic_rmw

    stock_cas = InterpreterBuilder.create_atomic_cas

    def create_atomic_cas(self, pointer, *rest):
        _memory.check(pointer, True)
        return stock_cas(self, pointer, *rest)

    InterpreterBuilder.create_atomic_cas = create_atomic_cas


# `create_load(ptr, cache, eviction, volatile)` became `create_load(ptr, cache_policy, volatile)` after 3.6.
_CACHE_ARGUMENTS = InterpreterBuilder.create_store.__code__.co_argcount - 3


def _reduce_and_scan() -> None:
    """3.6, 3.9: sum, max, min and cumsum of bf16 work on its bits, and those of fp16 round once at the end. A custom combine
    function is called for every element, which takes seconds.

    The fix combines blocks instead of elements: reductions in a tree of neighbours, as between the threads of a GPU, and
    scans from the first to the last. 16-bit floats are rounded after every step."""

    def combine(self, left, right, types):
        left, right = ([self.to_tensor(data, t) for data, t in zip(side, types, strict=True)] for side in (left, right))
        result = self.combine_fn(*left, *right)
        result = result if isinstance(result, tuple) else (result,)
        return [interpreter.interpreter_semantic.cast(r, t).handle.data for r, t in zip(result, types, strict=True)]

    def generic_reduce(self, inputs):
        types = [t.dtype.scalar for t in inputs]
        rank, axis = inputs[0].handle.data.ndim, self.axis
        blocks = [np.moveaxis(t.handle.data, axis, 0) if axis is not None else t.handle.data.reshape(-1) for t in inputs]
        while blocks[0].shape[0] > 1:
            shape = blocks[0][0::2].shape
            halves = [b[0::2] for b in blocks], [b[1::2] for b in blocks]
            blocks = [b.reshape(shape) for b in combine(self, *halves, types)]
        blocks = [b[0] for b in blocks]
        if self.keep_dims:
            blocks = [b.reshape([1] * rank) if axis is None else np.expand_dims(b, axis) for b in blocks]
        return [self.to_tensor(b, t) for b, t in zip(blocks, types, strict=True)]

    def generic_scan(self, inputs):
        types = [t.dtype.scalar for t in inputs]
        blocks = [np.moveaxis(t.handle.data, self.axis, 0) for t in inputs]
        outputs = [b.copy() for b in blocks]
        for i in range(1, blocks[0].shape[0]):
            step = combine(self, [o[i - 1] for o in outputs], [b[i] for b in blocks], types)
            for output, data in zip(outputs, step, strict=True):
                output[i] = data.reshape(output[i].shape)
        return [
            self.to_tensor(np.ascontiguousarray(np.moveaxis(o, 0, self.axis)), t)
            for o, t in zip(outputs, types, strict=True)
        ]

    def skips_shortcuts(stock, generic):
        def apply_impl(self, inputs):
            if not any(t.dtype.scalar in HALVES for t in inputs):
                return stock(self, inputs)
            if getattr(self, 'reverse', False):
                inputs = [self.to_tensor(np.flip(t.handle.data, self.axis), t.dtype) for t in inputs]
            result = generic(self, inputs)
            if getattr(self, 'reverse', False):
                result = [self.to_tensor(np.ascontiguousarray(np.flip(t.handle.data, self.axis)), t.dtype) for t in result]
            return result

        return apply_impl

    ReduceOps.generic_reduce = generic_reduce
    ReduceOps.apply_impl = skips_shortcuts(ReduceOps.apply_impl, generic_reduce)
    ScanOps.generic_scan = generic_scan
    ScanOps.apply_impl = skips_shortcuts(ScanOps.apply_impl, generic_scan)


# Memory


class _Memory:
    """The storages of the running kernel's tensor arguments."""

    def __init__(self) -> None:
        self.spans: set[tuple[int, int]] = set()

    def clear(self) -> None:
        self.spans.clear()

    def admit(self, tensor: object) -> None:
        storage = interpreter._unwrap_tensor(tensor).untyped_storage()
        self.spans.add((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))

    def check(self, pointers: TensorHandle, mask: object) -> None:
        addresses, mask = np.broadcast_arrays(pointers.data, mask)
        addresses = addresses[mask]
        size = np.uint64(max(1, pointers.get_element_ty().primitive_bitwidth // 8))
        inside = np.zeros(addresses.shape, bool)
        for start, end in self.spans:
            inside |= (addresses >= np.uint64(start)) & (addresses + size <= np.uint64(end))
        if not inside.all():
            raise IndexError(
                f'{np.count_nonzero(~inside)} of the {mask.size} lanes of a load or store are outside every tensor given to '
                f'the kernel; the first is lane {np.flatnonzero(mask)[np.flatnonzero(~inside)[0]]} of shape {mask.shape}'
            )


_memory = _Memory()


def _guard_memory() -> None:
    """3.6, 3.9: loads and stores out of bounds are not noticed. The fix raises IndexError.

    Masked lanes without an `other` are zero there, as they were on an H100. Triton's documentation leaves them undefined, so
    the fix makes floats NaN."""
    stock_load, stock_store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    stock_convert, stock_call = interpreter._implicit_cvt, GridExecutor.__call__

    def create_masked_load(self, pointers, mask, other, *rest, **cache):
        _memory.check(pointers, mask.data)
        element = pointers.get_element_ty()
        if other is None and element in FLOATS:
            nan = NAN_BF16 if element == tl.bfloat16 else np.nan
            other = TensorHandle(np.full(pointers.data.shape, nan, interpreter._get_np_dtype(element)), element)
        return stock_load(self, pointers, mask, other, *rest, **cache)

    def create_masked_store(self, pointers, value, mask, *rest):
        _memory.check(pointers, mask.data)
        return stock_store(self, pointers, value, mask, *rest)

    def implicit_convert(argument):
        if hasattr(argument, 'data_ptr'):
            _memory.admit(argument)
        return stock_convert(argument)

    def call(self, *args, **kwargs):
        _memory.clear()
        return stock_call(self, *args, **kwargs)

    InterpreterBuilder.create_masked_load = create_masked_load
    InterpreterBuilder.create_masked_store = create_masked_store
    interpreter._implicit_cvt = implicit_convert
    GridExecutor.__call__ = call


# Language


def _as_int(value: object) -> int:
    value = getattr(value, 'value', value)  # of a constexpr
    return int(value.handle.data.item()) if isinstance(value, tl.tensor) else int(value)


def loop_range(start, end=None, step=1, **options):
    """`range` and `tl.range` as in the compiler: the loop variable is a tensor of the widest type of the bounds."""
    start, end = (0, start) if end is None else (start, end)
    bounds = [bound for bound in (start, end, step) if isinstance(bound, tl.tensor)]
    kind = tl.int64 if any(bound.dtype.primitive_bitwidth == 64 for bound in bounds) else tl.int32
    for i in range(_as_int(start), _as_int(end), _as_int(step)):
        yield tl.tensor(TensorHandle(np.array([i], interpreter._get_np_dtype(kind)), kind), kind)


def join_truths(method: str, *operands):
    """`and` and `or` as in the compiler: tensors are combined element by element, other values short-circuit."""
    value = operands[0]()
    for operand in operands[1:]:
        if isinstance(value, tl.tensor):
            value = getattr(value, method)(interpreter.interpreter_semantic.to_tensor(operand()))
        elif bool(value) is (method == 'logical_and'):
            value = operand()
    return value


def negate_truth(value):
    """`not` as in the compiler."""
    return value.__not__() if isinstance(value, tl.tensor) else not value


def _rewrite_kernels() -> None:
    """3.6, 3.9: a loop variable is a Python int, so that `i.to(tl.int64)` fails and arithmetic with it does not wrap. `and`,
    `or` and `not` use a block's truth value, which is True, so that `mask_a and mask_b` is mask_b."""

    def call(name, *arguments):
        return ast.Call(func=ast.Name(id=name, ctx=ast.Load()), args=list(arguments), keywords=[])

    def visit_For(self, node):
        self.generic_visit(node)
        if isinstance(node.iter, ast.Call) and isinstance(node.iter.func, ast.Name) and node.iter.func.id == 'range':
            node.iter.func.id = 'loop_range'
        return node

    def visit_BoolOp(self, node):
        self.generic_visit(node)
        method = ast.Constant('logical_and' if isinstance(node.op, ast.And) else 'logical_or')
        nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        operands = (ast.Lambda(args=nothing, body=value) for value in node.values)
        return ast.copy_location(call('join_truths', method, *operands), node)

    def visit_UnaryOp(self, node):
        self.generic_visit(node)
        return ast.copy_location(call('negate_truth', node.operand), node) if isinstance(node.op, ast.Not) else node

    transformer = interpreter.ASTTransformer
    if not hasattr(transformer, 'visit_Compare'):  # 3.6 does not visit the value of an assignment
        stock_assign = transformer.visit_Assign

        def visit_Assign(self, node):
            node.value = self.visit(node.value)
            return stock_assign(self, node)

        transformer.visit_Assign = visit_Assign
    transformer.visit_For, transformer.visit_BoolOp, transformer.visit_UnaryOp = visit_For, visit_BoolOp, visit_UnaryOp
    # FunctionRewriter gives a kernel the globals of the interpreter.
    for helper in (loop_range, join_truths, negate_truth):
        setattr(interpreter, helper.__name__, helper)


def _take_first_config() -> None:
    """3.6, 3.9: an autotuner with several configurations needs a GPU driver for its benchmark. The fix returns equal times,
    so that the first configuration after pruning wins."""
    Autotuner._bench = lambda self, *args, config, **meta: [0.0, 0.0, 0.0]


def _patch_language_once() -> None:
    """3.6, 3.9: `triton.language` is patched for every launch and every call of a device function, which takes most of the
    time of a small kernel. This process only interprets, so the fix patches once.

    It also patches builtins under other names (`exp = tl.exp`), and refuses a block as a truth value (`if block`), as the
    compiler does; there it was True."""
    modules = type('modules', (), {'__globals__': {'tl': tl, 'core': tl.core}})
    interpreter._patch_lang(modules)

    def to_bool(self):
        if sys._getframe(1).f_globals.get('__name__') == 'triton.language.semantic':
            return True  # `if other` there tests whether `other` is given, as in the compiler
        if self.handle.data.size != 1:
            raise TypeError('a block has no truth value: use tl.where, or reduce it to a scalar')
        return bool(self.handle.data.item())

    tl.tensor.__bool__ = to_bool
    tl.tensor.__index__ = _as_int  # 3.6: int() of an array of one element, an error since NumPy 2.4
    tl.range = tl.core.range = loop_range

    def patch_language(function):
        for name, value in function.__globals__.items():
            if tl.core.is_builtin(value):
                function.__globals__[name] = functools.partial(value, _semantic=interpreter.interpreter_semantic)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_language
