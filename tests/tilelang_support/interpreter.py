"""Runs our TileLang kernels on a CPU without TileLang, by executing their source in numpy.

`load(module)` reads the source of a module of kernels and replaces its `T`. Blocks run one after the other. A parallel loop
runs once, on arrays of its indices, and code of threads once, on an array of thread numbers. An `if` on such an array masks
the stores in its body. Shared memory and registers start as NaN, and reads out of bounds are NaN, except for tiles copied
whole, which the copy engine fills with zeros.

Numbers are float32, rounded to the dtype of the buffer that they are stored in; sums are float64. The interpreter cannot
check what depends on the compiler and the machine: layouts, barriers, and memory used twice.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import importlib.util
import itertools
import types
from pathlib import Path

import numpy as np
import torch

INTEGERS = {'int32': np.int64, 'int64': np.int64}


def rounded(x, dtype):
    if dtype in INTEGERS:
        return np.asarray(x).astype(np.int64)
    x = torch.as_tensor(np.asarray(x, dtype=np.float64)).float()
    return x.to(getattr(torch, dtype)).float().numpy().astype(np.float64)


class Size:
    """A dimension that gets its value from a call."""

    def __init__(self, name):
        self.name, self.value = name, None

    def __index__(self):
        return self.value


for _name in ('add', 'radd', 'sub', 'rsub', 'mul', 'rmul'):
    setattr(Size, f'__{_name}__', lambda self, other, name=_name: getattr(int(self), f'__{name}__')(other))


class Machine:
    """State of the running block."""

    mask = None
    threads = 0


def masked(value, old):
    """Returns `value` where the mask is set, else `old`."""
    return value if Machine.mask is None else np.where(Machine.mask, value, old)


class Buffer:
    """Memory with bounds and a dtype."""

    def __init__(self, shape, dtype, data=None):
        self.shape, self.dtype = tuple(int(n) for n in shape), dtype
        self.data = np.full(self.shape, -(2**31) if dtype in INTEGERS else np.nan) if data is None else data

    def _index(self, key):
        key = key if isinstance(key, tuple) else (key,)
        assert len(key) == len(self.shape), f'{len(key)} indices for shape {self.shape}'
        return np.broadcast_arrays(*(np.asarray(k).astype(np.int64) for k in key))

    def __getitem__(self, key):
        if isinstance(key, tuple) and any(isinstance(k, slice) for k in key):
            return self._tile(key)
        index = self._index(key)
        inside = np.logical_and.reduce([(i >= 0) & (i < n) for i, n in zip(index, self.shape, strict=True)])
        safe = tuple(np.clip(i, 0, max(n - 1, 0)) for i, n in zip(index, self.shape, strict=True))
        found = self.data[safe]
        if self.dtype in INTEGERS:
            assert np.all(inside), 'an index is read out of bounds'
            return int(found) if found.ndim == 0 else found
        return np.where(inside, found, np.nan)

    def _tile(self, key):
        """Returns a region as the copy engine reads it, with zeros out of bounds."""
        starts = [int(k.start) if isinstance(k, slice) else int(k) for k in key]
        sizes = [int(k.stop) - int(k.start) if isinstance(k, slice) else 1 for k in key]
        out = np.zeros(sizes)
        here = tuple(slice(s, min(s + n, m)) for s, n, m in zip(starts, sizes, self.shape, strict=True))
        part = self.data[here]
        out[tuple(slice(0, n) for n in part.shape)] = part
        return out.reshape([n for k, n in zip(key, sizes, strict=True) if isinstance(k, slice)])

    def __setitem__(self, key, value):
        index = self._index(key)
        mask = True if Machine.mask is None else Machine.mask
        *index, value, mask = np.broadcast_arrays(*index, value, mask)
        inside = np.logical_and.reduce([(i >= 0) & (i < n) for i, n in zip(index, self.shape, strict=True)])
        assert np.all(inside | ~mask), f'a store out of the bounds {self.shape}'
        self.data[tuple(i[mask] for i in index)] = rounded(value[mask], self.dtype)


class Local:
    """An array of one thread, for all threads at once."""

    def __init__(self, shape, dtype):
        self.values = [np.nan] * int(shape[0])

    def __getitem__(self, i):
        return self.values[i]

    def __setitem__(self, i, value):
        self.values[i] = masked(value, self.values[i])


def uniform(x):
    """Returns a number if all threads have the same, else the array."""
    return x.flat[0].item() if isinstance(x, np.ndarray) and x.size and np.all(x == x.flat[0]) else x


class Language:
    """Replaces `tilelang.language`."""

    int32, float32 = 'int32', 'float32'
    min, max = staticmethod(np.minimum), staticmethod(np.maximum)
    exp, log, abs = staticmethod(np.exp), staticmethod(np.log), staticmethod(np.abs)
    exp2, log2 = staticmethod(np.exp2), staticmethod(np.log2)
    bitwise_xor, shift_right = staticmethod(np.bitwise_xor), staticmethod(np.right_shift)

    dynamic = staticmethod(Size)

    class GemmWarpPolicy:
        FullRow = 'rows'

    class Tensor:
        def __init__(self, shape, dtype):
            self.shape, self.dtype = shape, dtype

    @staticmethod
    def prim_func(function):
        return Kernel(function)

    @staticmethod
    def alloc_shared(shape, dtype):
        return Buffer(shape, dtype)

    alloc_fragment = alloc_shared
    alloc_local = staticmethod(Local)

    @staticmethod
    def alloc_var(dtype):
        return np.nan

    @staticmethod
    def get_thread_binding():
        return np.arange(Machine.threads)

    @staticmethod
    def serial(count):
        return range(int(uniform(count)))

    unroll = serial

    @staticmethod
    def Pipelined(count, num_stages):
        return range(int(uniform(count)))

    @staticmethod
    def Parallel(*extents):
        arrays = np.meshgrid(*(np.arange(n) for n in extents), indexing='ij')
        yield arrays[0] if len(arrays) == 1 else tuple(arrays)

    @staticmethod
    def if_then_else(condition, yes, no):
        return uniform(np.where(condition, yes, no))

    @staticmethod
    def cast(x, dtype):
        return uniform(rounded(x, dtype)) if np.ndim(x) == 0 else rounded(x, dtype)

    @staticmethod
    def rsqrt(x):
        return 1.0 / np.sqrt(x)

    @staticmethod
    def truncdiv(a, b):
        return np.asarray(a) // int(b) if np.ndim(a) else int(a) // int(b)

    @staticmethod
    def truncmod(a, b):
        return np.asarray(a) % int(b) if np.ndim(a) else int(a) % int(b)

    @staticmethod
    def infinity(dtype):
        return np.inf

    @staticmethod
    def min_value(dtype):
        return torch.finfo(getattr(torch, dtype)).min

    @staticmethod
    def sync_threads():
        pass

    @staticmethod
    def clear(buffer):
        buffer.data[...] = 0

    @staticmethod
    def fill(buffer, value):
        buffer.data[...] = rounded(value, buffer.dtype)

    @staticmethod
    def copy(source, target):
        data = source.data if isinstance(source, Buffer) else source
        target.data[...] = rounded(data, target.dtype).reshape(target.shape)

    @staticmethod
    def gemm(A, B, C, transpose_A=False, transpose_B=False, clear_accum=False, policy=None):
        a, b = A.data.T if transpose_A else A.data, B.data.T if transpose_B else B.data
        assert A.dtype == B.dtype
        C.data[...] = rounded(a @ b + (0 if clear_accum else C.data), C.dtype)

    @staticmethod
    def reduce_sum(source, target, dim):
        target.data[...] = rounded(source.data.sum(dim), target.dtype)

    @staticmethod
    def reduce_max(source, target, dim, clear=True):
        found = source.data.max(dim)
        target.data[...] = found if clear else np.maximum(target.data, found)

    @staticmethod
    def cumsum(src, dst, dim):
        dst.data[...] = rounded(src.data.cumsum(dim), dst.dtype)

    @staticmethod
    def warp_reduce_sum(x):
        x = np.broadcast_to(x, (Machine.threads,))
        return np.repeat(x.reshape(-1, 32).sum(1), 32)


def blocks(*extents, threads):
    """Yields the blocks of a grid, one after the other."""
    Machine.threads, Machine.mask = threads, None
    return itertools.product(*(range(int(n)) for n in extents))


@contextlib.contextmanager
def below(condition):
    """Masks the stores of a body under an `if` on an array."""
    before = Machine.mask
    Machine.mask = condition if before is None else before & condition
    try:
        yield
    finally:
        Machine.mask = before


class Kernel:
    """A kernel as the launchers call it, with tensors by position that it writes in place."""

    def __init__(self, function):
        self.function, self.specs = function, list(function.__annotations__.values())

    def __call__(self, *arguments):
        assert len(arguments) == len(self.specs)
        passed = []
        sizes = {}
        for spec, value in zip(self.specs, arguments, strict=True):
            if isinstance(spec, Language.Tensor):
                assert str(value.dtype) == f'torch.{spec.dtype}', f'{value.dtype} for {spec.dtype}'
                assert value.is_contiguous()
                for size, actual in zip(spec.shape, value.shape, strict=True):
                    expected = sizes.setdefault(size.name, actual) if isinstance(size, Size) else size
                    assert expected == actual, f'{getattr(size, "name", size)} is {expected} and {actual}'
                    if isinstance(size, Size):
                        size.value = int(actual)
        for spec, value in zip(self.specs, arguments, strict=True):
            if isinstance(spec, Language.Tensor):
                wide = torch.int64 if spec.dtype in INTEGERS else torch.float64
                passed.append(Buffer(value.shape, spec.dtype, value.to(wide).numpy().copy()))
            else:
                passed.append(value)
        with np.errstate(all='ignore'):
            self.function(*passed)
        for buffer, value in zip(passed, arguments, strict=True):
            if isinstance(buffer, Buffer) and buffer.dtype not in INTEGERS:
                value.copy_(torch.from_numpy(buffer.data))


class Blend(ast.NodeTransformer):
    """Under a mask, a thread's variable keeps its value where the mask is not set."""

    def visit_Assign(self, node):
        target = node.targets[0]
        if isinstance(target, ast.Name) and target.id != '_condition':
            node.value = ast.Call(ast.Name('_masked', ast.Load()), [node.value, ast.Name(target.id, ast.Load())], [])
        return node


class Rewrite(ast.NodeTransformer):
    """Rewrites `with T.Kernel` as a loop over blocks, `if` on arrays as masks, and `and` and `or` for arrays."""

    def visit_With(self, node):
        self.generic_visit(node)
        call = node.items[0].context_expr
        call.func = ast.Name('_blocks', ast.Load())
        return ast.For(target=node.items[0].optional_vars, iter=call, body=node.body, orelse=[])

    def visit_AugAssign(self, node):
        # numpy would add in place, and so change other names of the same array.
        self.generic_visit(node)
        if not isinstance(node.target, ast.Name):
            return node
        value = ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
        return ast.Assign([ast.Name(node.target.id, ast.Store())], value)

    def visit_BoolOp(self, node):
        self.generic_visit(node)
        name = '_and' if isinstance(node.op, ast.And) else '_or'
        return ast.Call(ast.Name(name, ast.Load()), node.values, [])

    def visit_If(self, node):
        self.generic_visit(node)
        masked_body = [Blend().visit(statement) for statement in copy.deepcopy(node.body)]
        plain = ast.If(test=ast.Name('_condition', ast.Load()), body=node.body, orelse=node.orelse)
        below_it = ast.Call(ast.Name('_below', ast.Load()), [ast.Name('_condition', ast.Load())], [])
        is_array = ast.parse('isinstance(_condition, _array)', mode='eval').body
        return [
            ast.Assign([ast.Name('_condition', ast.Store())], node.test),
            ast.If(test=is_array, body=[ast.With(items=[ast.withitem(below_it)], body=masked_body)], orelse=[plain]),
        ]


def every(*values):
    return functools.reduce(np.logical_and, values)


def some(*values):
    return functools.reduce(np.logical_or, values)


def load(name):
    """Loads a module of kernels with this language instead of TileLang's. Its dotted name is looked up, not imported."""
    parent = importlib.util.find_spec(name.rpartition('.')[0])
    path = Path(parent.submodule_search_locations[0]) / f'{name.rpartition(".")[2]}.py'
    tree = ast.parse(path.read_text())
    module = types.ModuleType(f'interpreted.{name}')
    vars(module).update(T=Language, _blocks=blocks, _below=below, _masked=masked, _array=np.ndarray, _and=every, _or=some)
    body = []
    for node in tree.body:
        if isinstance(node, ast.Import) and node.names[0].name == 'tilelang.language':
            continue
        if isinstance(node, ast.ImportFrom) and node.module == 'fla.ops.launch.tilelang_language':
            shared = load(node.module)
            vars(module).update({alias.name: getattr(shared, alias.name) for alias in node.names})
            continue
        body.append(Rewrite().visit(node))
    tree.body = body
    # Without this module's future annotations, because those of kernels are values.
    exec(compile(ast.fix_missing_locations(tree), str(path), 'exec', dont_inherit=True), vars(module))
    return module
