"""`fla.ops.utils`: tables of packed sequences, sums within chunks, triangular inverses; each against its definition, step by
step in float64."""

import importlib

import pytest
import torch

from fla.ops.utils import (
    chunk_global_cumsum,
    chunk_local_cumsum,
    prepare_chunk_indices,
    prepare_chunk_offsets,
    prepare_lens,
    solve_tril,
)
from tests import bounds

LENS = {'equal': None, 'packed': [0, 5, 0, 0, 1, 7, 4, 0], 'one': [9], 'nothing': [], 'empty': [0, 0]}
FP32, FP64 = torch.float32, torch.float64


def ends_of(lens, dtype=torch.int64):
    return None if lens is None else torch.tensor([0, *lens]).cumsum(0).to(dtype)


def steps(lens, *rest, dtype=FP64):
    """Two rows of 13 steps, or packed sequences."""
    shape = (2, 13) if lens is None else (1, sum(lens))
    return torch.randn(*shape, *rest, dtype=dtype, generator=torch.Generator().manual_seed(1))


def spans(lens, batch, length, size):
    """(row, first, last) of each chunk; without a size a chunk is a sequence."""
    found = []
    for row in range(batch):
        start = 0
        for n in [length] if lens is None else lens:
            of = n if size is None else size
            found += [(row, a, min(a + of, start + n)) for a in range(start, start + n, of or 1)]
            start += n
    return found


def test_import_paths():
    package = importlib.import_module('fla.ops.utils')
    for path in ('index.prepare_lens', 'index.prepare_chunk_indices', 'index.prepare_chunk_offsets'):
        module, name = path.split('.')
        assert getattr(importlib.import_module(f'fla.ops.utils.{module}'), name) is getattr(package, name)
    for path in ('cumsum.chunk_local_cumsum', 'cumsum.chunk_global_cumsum', 'solve_tril.solve_tril'):
        module, name = path.split('.')
        assert getattr(importlib.import_module(f'fla.ops.utils.{module}'), name) is getattr(package, name)


@pytest.mark.parametrize('dtype', [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize('size', [1, 3, 4, 100])
@pytest.mark.parametrize('lens', [x for x in LENS.values() if x is not None], ids=[x for x in LENS if x != 'equal'])
def test_tables(lens, size, dtype):
    ends = ends_of(lens, dtype)
    table = [[n, c] for n, length in enumerate(lens) for c in range(-(-length // size))]
    for more in ({}, {'cu_seqlens_cpu': ends}):
        found = prepare_chunk_indices(ends, size, **more)
        assert (found.tolist(), found.dtype, found.shape[1]) == (table, dtype, 2)
    counts = [-(-n // size) for n in lens]
    offsets = prepare_chunk_offsets(ends, size)
    assert (offsets.tolist(), offsets.dtype) == ([sum(counts[:n]) for n in range(len(lens) + 1)], dtype)
    assert (prepare_lens(ends).tolist(), prepare_lens(ends).dtype) == (lens, dtype)


@pytest.mark.parametrize('scale', [None, 0.5])
@pytest.mark.parametrize('reverse', [False, True])
@pytest.mark.parametrize('size', [1, 4, None])
@pytest.mark.parametrize('lens', LENS.values(), ids=LENS)
def test_sums(lens, size, reverse, scale):
    for rest in ((2,), (2, 3)):
        x = steps(lens, *rest).requires_grad_()
        right = torch.zeros_like(x)
        for row, first, last in spans(lens, *x.shape[:2], size):
            for t in range(first, last):
                right[row, t] = x.detach()[row, t:last].sum(0) if reverse else x.detach()[row, first : t + 1].sum(0)
        right *= 1 if scale is None else scale
        options = {'reverse': reverse, 'scale': scale, 'cu_seqlens': ends_of(lens), 'output_dtype': None}
        found = chunk_global_cumsum(x, **options) if size is None else chunk_local_cumsum(x, size, **options)
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)
        (dx,) = torch.autograd.grad(found, x, torch.ones_like(x))
        count = torch.zeros_like(x)
        for row, first, last in spans(lens, *x.shape[:2], size):
            for t in range(first, last):
                count[row, t] = (t - first + 1 if reverse else last - t) * (scale or 1)
        torch.testing.assert_close(dx, count, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('size', [1, 4, 16])
@pytest.mark.parametrize('lens', LENS.values(), ids=LENS)
def test_inverses(lens, size):
    A = steps(lens, 3, size).requires_grad_()
    found = solve_tril(A, ends_of(lens), output_dtype=None)
    right = torch.zeros_like(A)
    for row, first, last in spans(lens, *A.shape[:2], size):
        n = last - first
        matrix = A[row, first:last, :, :n].transpose(0, 1).tril(-1) + torch.eye(n, dtype=FP64)
        right = right.index_put(
            (torch.tensor(row), torch.arange(first, last)),
            torch.nn.functional.pad(matrix.inverse().transpose(0, 1), (0, size - n)),
        )
    torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-9)
    weights = torch.linspace(-1, 1, A.numel(), dtype=FP64).view_as(A)
    if A.numel():
        (one,), (other,) = (torch.autograd.grad(x, A, weights) for x in (found, right))
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, FP32], ids=str)
def test_dtypes(dtype):
    """Half-precision arguments are summed and solved in float32."""
    x = (steps(None, 2, 16) / 4).to(dtype)
    for call in (lambda x: chunk_local_cumsum(x, 4), chunk_global_cumsum, solve_tril):
        found, right = call(x), call(x.double())
        assert found.dtype == FP32
        assert float((found - right).norm() / right.norm()) < bounds.EXACT[FP32]
    assert chunk_local_cumsum(x, 4, output_dtype=None).dtype == dtype
    assert solve_tril(x, output_dtype=torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize('dtype', [torch.int32, torch.int64], ids=str)
def test_chunks_longer_than_any_sequence(dtype):
    lens = torch.tensor([0, 5, 5, 9], dtype=dtype)
    for size in (9, 2**31 - 1, 2**31 + 5, 2**40):
        assert prepare_chunk_offsets(lens, size).tolist() == [0, 1, 1, 2]
    x = torch.randn(1, 9, 2)
    torch.testing.assert_close(chunk_local_cumsum(x, 2**40), x.cumsum(1))


X, A4 = torch.zeros(1, 6, 2), torch.zeros(1, 6, 2, 4)
CU = torch.tensor([0, 2, 6])
BAD = {
    'no lengths': (lambda: prepare_lens(None), TypeError, "argument 'cu_seqlens' must be a tensor, got None"),
    'a matrix of lengths': (lambda: prepare_lens(CU[None]), ValueError, r'cu_seqlens must be \[N \+ 1\]'),
    'no 0': (lambda: prepare_lens(CU[:0]), ValueError, r'cu_seqlens must be \[N \+ 1\]'),
    'floating lengths': (lambda: prepare_lens(CU.float()), TypeError, 'cu_seqlens must be int32 or int64'),
    'other lengths on the host': (
        lambda: prepare_chunk_indices(CU, 4, CU[:2]),
        ValueError,
        r'cu_seqlens_cpu must be cu_seqlens \[3\] on the CPU, got \[2\] on cpu',
    ),
    'falling lengths': (
        lambda: prepare_lens(torch.tensor([0, 5, 3])),
        ValueError,
        'cu_seqlens must not decrease: entry 1 is 5',
    ),
    'lengths that begin late': (lambda: prepare_chunk_offsets(CU + 1, 2), ValueError, 'cu_seqlens must start at 0, got 1'),
    'another copy': (
        lambda: prepare_chunk_indices(CU, 4, torch.tensor([0, 3, 6])),
        ValueError,
        'cu_seqlens_cpu must be a copy of cu_seqlens',
    ),
    'chunks of nothing': (lambda: prepare_chunk_offsets(CU, 0), ValueError, 'chunk_size must be at least 1, got 0'),
    'half chunks': (lambda: prepare_chunk_indices(CU, 1.5), TypeError, 'chunk_size must be an int, got float'),
    'a bool': (lambda: chunk_local_cumsum(X, True), TypeError, 'chunk_size must be an int, got bool'),
    'two dimensions': (lambda: chunk_local_cumsum(X[0], 4), ValueError, r'g must be \[B, T, H\] or \[B, T, H, D\]'),
    'whole numbers': (lambda: chunk_global_cumsum(X.long()), TypeError, 's must be float16, bfloat16, float32 or float64'),
    'a batch': (lambda: chunk_global_cumsum(X.expand(2, -1, -1), cu_seqlens=CU), ValueError, 'the batch must be 1'),
    'steps in no sequence': (lambda: chunk_local_cumsum(X, 4, cu_seqlens=CU[:2]), ValueError, 'cu_seqlens'),
    'a scale': (lambda: chunk_local_cumsum(X, 4, scale='1'), TypeError, 'scale must be a number or None'),
    'whole results': (lambda: chunk_local_cumsum(X, 4, output_dtype=torch.int32), TypeError, 'output_dtype must be float16'),
    'a result of words': (lambda: chunk_global_cumsum(X, output_dtype='float32'), TypeError, "or None, got 'float32'"),
    'truth': (lambda: solve_tril(A4, output_dtype=torch.bool), TypeError, 'output_dtype must be .* got torch.bool'),
    'no chunks': (lambda: solve_tril(A4[..., :0]), ValueError, 'A must have chunks of at least one step'),
    'three dimensions': (lambda: solve_tril(X), ValueError, r'A must be \[B, T, H, C\]'),
    'a table': (lambda: solve_tril(A4, CU, torch.zeros(3).int()), ValueError, r'chunk_indices must be \[chunks, 2\]'),
    'two devices': (lambda: solve_tril(A4, CU.to('meta')), ValueError, 'cu_seqlens'),
}


@pytest.mark.parametrize(('call', 'kind', 'message'), BAD.values(), ids=BAD)
def test_bad_calls(call, kind, message):
    with pytest.raises(kind, match=message):
        call()
