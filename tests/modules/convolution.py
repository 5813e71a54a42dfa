"""The short convolution by its definition, over whole sequences at a time, and steps that the interpreter and a GPU are both
tested with."""

import itertools

import torch

from fla.modules.causal_conv1d import causal_conv1d_update
from tests import bounds

from .oracle import served_by


def convolved(x, weight, bias=None, residual=None, initial_state=None, activation=None, cu_seqlens=None, **_):
    """y and the last W steps, computed for each sequence, in the dtype of the arguments."""
    width = weight.shape[1]
    pieces = list(x) if cu_seqlens is None else [x[0, a:b] for a, b in itertools.pairwise(cu_seqlens.tolist())]
    ys, states = [], []
    for n, piece in enumerate(pieces):
        before = x.new_zeros(width, x.shape[2]) if initial_state is None else initial_state[n].t()
        steps = torch.cat([before, piece])
        ys.append(sum(weight[:, w] * steps[1 + w : 1 + w + len(piece)] for w in range(width)))
        states.append(steps[len(piece) :].t())
    y = torch.cat(ys).reshape(x.shape)
    y = y if bias is None else y + bias
    y = y if activation is None else y / (1 + torch.exp(-y))
    return y if residual is None else y + residual, torch.stack(states)


# shape of x for N sequences and D channels; W; the optional arguments; the activation
UPDATES = {
    'everything': ('n d', 4, 'bias residual', 'silu'),
    'no bias': ('n 1 d', 4, 'residual', 'swish'),
    'no residual': ('1 n d', 3, 'bias', 'silu'),
    'bare': ('n d', 4, '', None),
    'no activation': ('1 n d', 2, 'bias residual', None),
    'one tap': ('n 1 d', 1, 'bias', 'silu'),
    'eight taps': ('n d', 8, 'bias residual', 'silu'),
    'strided': ('n d', 4, 'bias residual strided', 'silu'),
    'a wide cache': ('n d', 4, 'bias wide', 'silu'),
    'a narrow cache': ('n 1 d', 4, 'bias narrow', 'silu'),
}


def check_update(case, count, channels, dtype, device):
    """Two steps: y is within its bound of float64, and the cache is shifted exactly."""
    shape, width, given, activation = UPDATES[case]
    generator = torch.Generator().manual_seed(3)

    def new(*sizes, dtype=dtype):
        apart = 2 if 'strided' in given else 1
        made = torch.randn([apart * size for size in sizes], generator=generator).to(device, dtype)
        return made[tuple(slice(None, None, apart) for _ in sizes)]

    weight, bias = new(channels, width), new(channels) if 'bias' in given else None
    cache_dtype = torch.float32 if 'wide' in given else torch.bfloat16 if 'narrow' in given else dtype
    cache = new(count, channels, width, dtype=cache_dtype)
    sizes = [{'n': count, '1': 1, 'd': channels}[one] for one in shape.split()]
    for _ in range(2):
        x, residual = new(*sizes), new(*sizes) if 'residual' in given else None
        wide = [None if one is None else one.double() for one in (x, weight, bias, residual, cache)]
        for i in (0, 3):  # as sequences of one step
            wide[i] = None if wide[i] is None else wide[i].reshape(count, 1, channels)
        expected, state = convolved(*wide, activation)
        with torch.no_grad(), served_by('default'):
            y, after = causal_conv1d_update(x, cache, residual, weight, bias, activation)
        assert after is cache
        assert (y.shape, y.dtype) == (x.shape, dtype)
        assert bounds.relative_rms(expected.reshape(sizes), y) <= bounds.of_convolution(dtype)
        # the sum uses x itself, the cache x in its own dtype
        assert torch.equal(cache, state.to(cache_dtype))
