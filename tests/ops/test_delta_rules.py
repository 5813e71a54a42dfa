"""The numbers of the gated delta rule and of Kimi delta attention on their reference backend, against the definition in
float64."""

from functools import partial

import pytest
import torch
from torch.autograd import forward_ad

from fla.backends import explain, trace
from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule, naive_recurrent_gated_delta_rule
from fla.ops.kda import chunk_kda, naive_recurrent_kda
from tests import bounds
from tests.ops.delta_rules import (
    CHUNKED,
    FUNCTIONS,
    GDN,
    KDA,
    case,
    definition,
    grid,
    measure,
    name_of,
    on_grid,
)

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
every_function = pytest.mark.parametrize('function', FUNCTIONS, ids=name_of)
NARROW = ('three chunks', 'one step', 'spread gates', 'strong gates', 'everything', 'packed', 'packed int64')


def check(given, run):
    wrong = {}
    for name, (rms, row, dtype) in measure(given, run).items():
        bound, row_bound = bounds.of_reference(dtype)
        if not (rms <= bound and row <= row_bound):
            wrong[name] = rms, row, dtype
    assert not wrong


def run_of(function, given, **more):
    return lambda tensors: given.with_tensors(**tensors).call(function, **more)


def dense(q, k, v, g, beta, scale, state):
    """One head of one sequence by the product of all transition matrices: nothing is carried from step to step.
    q, k `[T, K]`, v `[T, V]`, g `[T, K]`, beta `[T]`, state `[K, V]`."""
    T, K = q.shape
    eye = torch.eye(K, dtype=q.dtype)
    steps = [(eye - beta[t] * torch.outer(k[t], k[t])) @ torch.diag(g[t].exp()) for t in range(T)]

    def through(first, last):
        product = eye
        for t in range(first, last):
            product = steps[t] @ product
        return product

    def state_after(t):
        written = [through(j + 1, t) @ torch.outer(k[j], beta[j] * v[j]) for j in range(t)]
        return through(0, t) @ state + sum(written, torch.zeros_like(state))

    o = torch.stack([scale * state_after(t + 1).T @ q[t] for t in range(T)])
    return o, state_after(T)


@pytest.mark.parametrize('function', CHUNKED, ids=name_of)
def test_the_definition_is_the_product_of_its_transitions(function):
    given = case(function, T=6, H=2, HV=4, K=3, V=2, dtype=FP64, scale=0.7)
    o, state, _ = definition(given, given.tensors)
    q, k, v, g, beta, initial = given.tensors.values()
    for head in range(4):
        gate = g[0, :, head] if function in KDA else g[0, :, head, None].expand(-1, 3)
        values = (q[0, :, head // 2], k[0, :, head // 2], v[0, :, head], gate, beta[0, :, head], 0.7, initial[0, head])
        right_o, right_state = dense(*values)
        torch.testing.assert_close(o[0, :, head], right_o, rtol=0, atol=1e-13)
        torch.testing.assert_close(state[0, head], right_state, rtol=0, atol=1e-13)


@pytest.mark.pairwise
@pytest.mark.parametrize(('function', 'name'), grid(), ids=lambda x: x if isinstance(x, str) else x.__name__)
@pytest.mark.parametrize('dtype', [FP32, FP64], ids=['fp32', 'fp64'])
def test_results_and_gradients(function, name, dtype):
    given = on_grid(function, name, dtype=dtype)
    check(given, run_of(function, given))


@pytest.mark.pairwise
@pytest.mark.parametrize('gate_dtype', [FP32, None], ids=['gates fp32', 'gates narrow'])
@pytest.mark.parametrize('dtype', [BF16, FP16], ids=['bf16', 'fp16'])
@pytest.mark.parametrize('name', NARROW)
@every_function
def test_narrow_results_and_gradients(function, name, dtype, gate_dtype):
    given = on_grid(function, name, dtype=dtype, gate_dtype=gate_dtype or dtype)
    check(given, run_of(function, given))


@pytest.mark.parametrize('size', [16, 32, 64])
@pytest.mark.parametrize('name', ['three chunks', 'packed', 'below a block', 'one step'])
@pytest.mark.parametrize('function', CHUNKED, ids=name_of)
def test_chunk_sizes(function, name, size):
    if function is chunk_kda and size == 16:
        pytest.skip('chunk_kda takes 32 and 64')
    given = on_grid(function, name)
    check(given, run_of(function, given, chunk_size=size))


@every_function
def test_a_gate_of_minus_infinity_empties_the_state(function):
    given = case(function, T=70, strength='reset', dtype=FP64)
    right_o, right_final, _ = definition(given, given.tensors)
    o, final = given.call(function)
    torch.testing.assert_close(o, right_o, rtol=0, atol=1e-11)
    torch.testing.assert_close(final, right_final, rtol=0, atol=1e-11)


@pytest.mark.parametrize('extra', [('gk',), ('gv',), ('gk', 'gv')], ids='+'.join)
@pytest.mark.parametrize('lens', [None, [0, 4, 1]], ids=['equal', 'packed'])
@pytest.mark.parametrize('with_g', [True, False])
def test_recurrent_gates_of_channels(extra, lens, with_g):
    given = case(fused_recurrent_gated_delta_rule, T=5, lens=lens, HV=2, K=4, V=3, dtype=FP64)
    tensors = given.tensors
    gk = -torch.rand(*tensors['g'].shape, 4, dtype=FP64)
    gv = -torch.rand(*tensors['g'].shape, 3, dtype=FP64)
    more = {name: {'gk': gk, 'gv': gv}[name] for name in extra}
    total = torch.zeros_like(gk) + (tensors['g'][..., None] if with_g else 0) + (gk if 'gk' in extra else 0)
    arguments = {name: x for name, x in tensors.items() if name != 'g' or with_g}
    o, final = fused_recurrent_gated_delta_rule(**arguments, **more, output_final_state=True, cu_seqlens=given.cu_seqlens)
    for n in range(given.count):
        start, end = (0, 5) if lens is None else given.cu_seqlens[n : n + 2].tolist()
        state = tensors['initial_state'][n]
        for t in range(start, end):
            q, k = (tensors[x][0, t].expand(2, -1) for x in ('q', 'k'))
            state = total[0, t].exp()[:, :, None] * state * (gv[0, t].exp()[:, None] if 'gv' in extra else 1)
            error = tensors['v'][0, t] - torch.einsum('hkv,hk->hv', state, k)
            state = state + torch.einsum('hk,hv,h->hkv', k, error, tensors['beta'][0, t])
            torch.testing.assert_close(o[0, t], 0.5 * torch.einsum('hkv,hk->hv', state, q))
        torch.testing.assert_close(final[n], state)


@pytest.mark.parametrize('how', ['compiled', 'vmap', 'meta'])
def test_gates_of_values_where_lengths_cannot_be_read(how):
    """Step by step for all sequences, empty ones among them, as with lengths that the host has."""
    given = case(fused_recurrent_gated_delta_rule, lens=[0, 4, 0, 1], HV=2, K=4, V=3, dtype=FP64)
    leaves = {name: x.requires_grad_() for name, x in given.tensors.items()}
    leaves['gv'] = (-torch.rand(*given.tensors['g'].shape, 3, dtype=FP64)).requires_grad_()

    def call(lens, tensors=leaves):
        return fused_recurrent_gated_delta_rule(**tensors, output_final_state=True, cu_seqlens=lens)

    right = call(given.cu_seqlens)
    if how == 'meta':
        found = call(given.cu_seqlens.to('meta'), {name: x.to('meta') for name, x in leaves.items()})
        assert [(x.shape, x.dtype, x.is_meta) for x in found] == [(x.shape, x.dtype, True) for x in right]
        return
    if how == 'vmap':
        found = tuple(x[0] for x in torch.vmap(call)(given.cu_seqlens[None]))
    else:
        found = torch.compile(call, backend='eager', fullgraph=True)(given.cu_seqlens)
    torch.testing.assert_close(found, right)
    gradients = [torch.autograd.grad(sum(x.square().sum() for x in pair), [*leaves.values()]) for pair in (found, right)]
    torch.testing.assert_close(*gradients)


def test_gates_in_half_precision_are_added_in_float32():
    """A small gate of a channel beside a larger one of its head: their sum in bfloat16 would be the latter."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 64, 2, 8).bfloat16() for _ in range(3))
    beta = torch.rand(1, 64, 2).bfloat16()
    g, gk = torch.full((1, 64, 2), -0.0625).bfloat16(), torch.full((1, 64, 2, 8), -2e-4).bfloat16()
    state = torch.randn(1, 2, 8, 8)
    given = {'initial_state': state, 'output_final_state': True}
    o, final = fused_recurrent_gated_delta_rule(q, k, v, g, gk, beta=beta, **given)
    wide = [x.double() for x in (q, k, v, beta)]
    exact = naive_recurrent_gated_delta_rule(*wide, g.double()[..., None] + gk.double(), None, state.double(), True)
    assert bounds.relative_rms(exact[1], final) < bounds.of_reference(torch.float32)[0]
    assert bounds.relative_rms(exact[0], o) < bounds.of_reference(torch.bfloat16)[0]


@pytest.mark.parametrize('lens', [None, torch.tensor([0])], ids=['no rows', 'no sequences'])
@pytest.mark.parametrize('naive', [naive_recurrent_gated_delta_rule, naive_recurrent_kda], ids=lambda one: one.__name__)
def test_the_definition_of_nothing(naive, lens):
    batch = 0 if lens is None else 1
    q, v, gates = torch.zeros(batch, 0, 2, 4), torch.zeros(batch, 0, 2, 3), torch.zeros(batch, 0, 2)
    g = gates if 'gated' in naive.__name__ else q
    given = {'q': q, 'k': q, 'v': v, 'g': g, 'beta': gates, 'output_final_state': True, 'cu_seqlens': lens}
    o, final = naive(**given)
    assert (o.shape, final.shape) == (v.shape, (0, 2, 4, 3))


@pytest.mark.parametrize('T', [1, 20])
def test_recurrent_without_gate_and_beta(T):
    given = case(fused_recurrent_gated_delta_rule, T=T, dtype=FP64)
    q, k, v, g, beta, state = given.tensors.values()
    o, final = fused_recurrent_gated_delta_rule(
        q, k, v, initial_state=state, output_final_state=True, use_beta_sigmoid_in_kernel=True
    )
    right = naive_recurrent_gated_delta_rule(q, k, v, torch.ones_like(beta), torch.zeros_like(g), None, state, True)
    torch.testing.assert_close((o, final), right)


@pytest.mark.parametrize(
    'options', [{'T': 70, 'B': 2}, {'lens': [3, 0, 66, 1]}, {'T': 1}, {'T': 0, 'B': 2}, {'lens': []}], ids=str
)
@pytest.mark.parametrize('v_first', [False, True])
@pytest.mark.parametrize('size', [32, 64])
def test_intermediate_states(options, v_first, size):
    given = case(chunk_kda, HV=2, K=5, V=3, state_v_first=v_first, dtype=FP64, **options)
    lens = given.cu_seqlens
    with torch.no_grad():
        _o, final, h = given.call(chunk_kda, return_intermediate_states=True, cu_seqlens_cpu=lens, chunk_size=size)
    assert torch.equal(final, given.call(chunk_kda, chunk_size=size)[1])
    B, T = given.tensors['q'].shape[:2]
    spans = [(b, 0, T) for b in range(B)] if lens is None else [(0, *lens[i : i + 2].tolist()) for i in range(given.count)]
    right = []
    for n, (b, start, end) in enumerate(spans):
        for at in range(start, end, size):
            part = {x: y[b : b + 1, start:at] for x, y in given.tensors.items() if x != 'initial_state'}
            state = given.tensors['initial_state'][n : n + 1]
            state = state.transpose(-1, -2) if v_first else state
            state = naive_recurrent_kda(**part, initial_state=state, output_final_state=True)[1][0]
            right.append(state.transpose(-1, -2) if v_first else state)
    dims = (2, 3, 5) if v_first else (2, 5, 3)
    assert h.shape == (B, len(right) // max(B, 1), *dims)
    if right:
        torch.testing.assert_close(h.reshape(-1, *dims), torch.stack(right))


@every_function
@pytest.mark.parametrize('options', [{'T': 70, 'B': 2}, {'T': 1, 'B': 2}, {'T': 0, 'B': 2}, {'lens': [3, 0, 66]}], ids=str)
def test_layout_dtype_and_who_ran(function, options):
    for dtype in (BF16, FP32):
        given = case(function, H=2, HV=4, dtype=dtype, **options)
        kept = {name: x.clone() for name, x in given.tensors.items()}
        with trace() as t:
            o, final = given.call(function)
        decision = given.call(partial(explain, function))
        assert decision.winner == 'reference'
        assert [(record.function, record.backend) for record in t] == [(decision.function, 'reference')]
        assert (o.dtype, o.shape, o.is_contiguous()) == (dtype, given.tensors['v'].shape, True)
        assert (final.dtype, final.shape, final.is_contiguous()) == (FP32, kept['initial_state'].shape, True)
        assert function(**given.tensors, cu_seqlens=given.cu_seqlens)[1] is None
        # nothing that was given is changed, and nothing that is returned is something given
        final.fill_(7)
        o.fill_(7)
        assert all(torch.equal(x, kept[name]) for name, x in given.tensors.items())


@every_function
@pytest.mark.parametrize('options', [{'T': 70, 'B': 2, 'H': 2, 'HV': 4}, {'lens': [3, 0, 66]}, {'T': 1, 'B': 2}], ids=str)
def test_strided_inputs_and_same_bits_twice(function, options):
    given = case(function, **options)
    strided = {name: torch.stack((x, x), -1)[..., 0] for name, x in given.tensors.items()}
    strided['q'] = given.tensors['q'].transpose(1, 2).contiguous().transpose(1, 2)
    leaves = [{n: x.requires_grad_() for n, x in g.items()} for g in (given.tensors, given.tensors, strided)]
    found = []
    for tensors in leaves:
        o, final = given.with_tensors(**tensors).call(function)
        found.append([o, final, *torch.autograd.grad(o.square().sum() + final.sum(), list(tensors.values()))])
    for first, second, third in zip(*found, strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, third, rtol=1e-5, atol=1e-5)


@every_function
@pytest.mark.parametrize(
    'options',
    [{'T': 0, 'B': 2}, {'T': 5, 'B': 0}, {'T': 1, 'B': 0}, {'lens': []}, {'lens': [0, 0]}, {'lens': [0]}, {'T': 0, 'B': 0}],
    ids=str,
)
def test_nothing_to_do(function, options):
    given = case(function, H=2, HV=4, **options)
    o, final = given.call(function)
    assert o.shape == given.tensors['v'].shape
    assert torch.equal(final, given.tensors['initial_state'])
    assert final.data_ptr() != given.tensors['initial_state'].data_ptr() or final.numel() == 0
    leaf = given.tensors['initial_state'].requires_grad_()
    o, final = given.call(function)
    assert torch.equal(torch.autograd.grad(final.sum() + o.sum(), leaf)[0], torch.ones_like(leaf))
    del given.tensors['initial_state']
    assert not given.call(function)[1].any()


@pytest.mark.parametrize('name', ['q', 'k', 'v', 'g', 'beta', 'initial_state'])
@every_function
def test_nan_passes_through_and_stays_in_its_sequence_and_head(function, name):
    for options in ({'B': 3, 'T': 70}, {'lens': [30, 70, 0, 20]}):
        given = case(function, H=2, HV=2, K=4, V=3, **options)
        packed = given.cu_seqlens is not None
        tensors = {n: x.clone() for n, x in given.tensors.items()}
        poisoned = tensors[name]
        # the second sequence, its second head, at step 10
        if name == 'initial_state':
            poisoned[1, 1, 0] = torch.nan
        else:
            poisoned[(0, 40, 1) if packed else (1, 10, 1)] = torch.nan
        for x in tensors.values():
            x.requires_grad_()
        o, final = given.with_tensors(**tensors).call(function)
        mask = torch.zeros_like(o, dtype=torch.bool)
        mask[(0, slice(30, 100), 1) if packed else (1, slice(None), 1)] = True
        assert not o[~mask].isnan().any()
        last = (0, 99, 1) if packed else (1, 69, 1)
        if name == 'q':
            assert o[(0, 40, 1) if packed else (1, 10, 1)].isnan().all()
            assert not final.isnan().any()
        else:
            assert o[last].isnan().any()
            assert final[1, 1].isnan().any()
        others = torch.ones(final.shape[:2], dtype=torch.bool)
        others[1, 1] = False
        assert not final[others].isnan().any()
        gradients = torch.autograd.grad([o, final], list(tensors.values()), [torch.ones_like(o), torch.ones_like(final)])
        for n, gradient in zip(tensors, gradients, strict=True):
            clean = others if n == 'initial_state' else ~mask[..., 0]
            assert not gradient[clean].isnan().any(), n


TINY = {'T': 3, 'H': 1, 'HV': 2, 'K': 2, 'V': 2, 'dtype': FP64}


@pytest.mark.pairwise
@pytest.mark.parametrize('options', [{'T': 3}, {'T': 1}, {'T': 17}, {'lens': [2, 0, 1]}], ids=str)
@every_function
def test_gradcheck(function, options):
    given = case(function, **{**TINY, **options}, use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True)
    names = list(given.tensors)
    values = [x.requires_grad_() for x in given.tensors.values()]

    def run(*tensors):
        return given.with_tensors(**dict(zip(names, tensors, strict=True))).call(function)

    fast = options != {'T': 3}
    assert torch.autograd.gradcheck(run, values, fast_mode=fast, check_forward_ad=True)


@pytest.mark.parametrize('options', [{'T': 3}, {'T': 1}, {'lens': [2, 0, 1]}], ids=str)
@every_function
def test_gradgradcheck(function, options):
    given = case(function, **{**TINY, **options}, use_beta_sigmoid_in_kernel=True)
    names = list(given.tensors)
    values = [x.requires_grad_() for x in given.tensors.values()]

    def run(*tensors):
        return given.with_tensors(**dict(zip(names, tensors, strict=True))).call(function)

    assert torch.autograd.gradgradcheck(run, values, fast_mode=True)


@pytest.mark.parametrize('options', [{'T': 20}, {'T': 1}, {'lens': [2, 0, 18]}], ids=str)
@every_function
def test_torch_func(function, options):
    given = case(function, HV=2, K=3, V=2, dtype=FP64, **options)

    def loss(v, beta):
        o, final = given.with_tensors(v=v, beta=beta).call(function)
        return o.square().sum() + final.sum()

    v, beta = given.tensors['v'], given.tensors['beta']
    leaves = v.clone().requires_grad_(), beta.clone().requires_grad_()
    right = torch.autograd.grad(loss(*leaves), leaves)
    torch.testing.assert_close(torch.func.grad(loss, (0, 1))(v, beta), right)
    torch.testing.assert_close(torch.func.jacrev(loss, 1)(v, beta), right[1])
    direction = torch.ones_like(v), torch.ones_like(beta)
    value, slope = torch.func.jvp(loss, (v, beta), direction)
    torch.testing.assert_close(value, loss(v, beta))
    torch.testing.assert_close(slope, right[0].sum() + right[1].sum())
    with forward_ad.dual_level():
        dual = loss(*(forward_ad.make_dual(*pair) for pair in zip((v, beta), direction, strict=True)))
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, slope)
    many = torch.stack((v, 2 * v, -v))
    torch.testing.assert_close(torch.vmap(loss, (0, None))(many, beta), torch.stack([loss(x, beta) for x in many]))
    each = torch.vmap(torch.func.grad(loss), (0, None))(many, beta)
    torch.testing.assert_close(each[0], right[0])


@pytest.mark.parametrize('cast', [BF16, FP16], ids=['bf16', 'fp16'])
@pytest.mark.parametrize('name', ['three chunks', 'one step', 'packed', 'everything'])
@every_function
def test_autocast_changes_nothing(function, name, cast):
    for dtype in (FP32, BF16):
        given = on_grid(function, name, dtype=dtype)
        leaves = [x.requires_grad_() for x in given.tensors.values()]
        o, final = given.call(function)
        right = torch.autograd.grad([o, final], leaves, [torch.ones_like(o), torch.ones_like(final)])
        with torch.autocast('cpu', cast):
            cast_o, cast_final = given.call(function)
            got = torch.autograd.grad([cast_o, cast_final], leaves, [torch.ones_like(o), torch.ones_like(final)])
        assert (cast_o.dtype, cast_final.dtype) == (dtype, FP32)
        for a, b in zip((o, final, *right), (cast_o, cast_final, *got), strict=True):
            assert a.dtype == b.dtype
            # a sum may be taken in another order
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@every_function
def test_prefill_then_decode(function):
    """A sequence in one call, and in pieces that hand on their state."""
    given = case(function, T=70, H=1, HV=2, dtype=FP64, state_v_first=True)
    o, final = given.call(function)
    state, pieces = given.tensors['initial_state'], []
    steps = {n: x for n, x in given.tensors.items() if n != 'initial_state'}
    single = (GDN if function in GDN else KDA)[1]
    for start, end in ((0, 66), (66, 67), (67, 68), (68, 70)):
        served = function if end - start > 1 else single
        part = {n: x[:, start:end] for n, x in steps.items()}
        piece, state = served(**part, initial_state=state, output_final_state=True, state_v_first=True)
        pieces.append(piece)
    torch.testing.assert_close(torch.cat(pieces, 1), o, rtol=0, atol=1e-12)
    torch.testing.assert_close(state, final, rtol=0, atol=1e-12)


@every_function
def test_a_sequence_is_the_same_alone_and_packed(function):
    given = case(function, lens=[5, 0, 70, 1], dtype=FP64, initial=False)
    o, final = given.call(function)
    for n, (start, end) in enumerate(((0, 5), (5, 5), (5, 75), (75, 76))):
        alone, state = function(**{name: x[:, start:end] for name, x in given.tensors.items()}, output_final_state=True)
        torch.testing.assert_close(o[:, start:end], alone, rtol=0, atol=1e-12)
        torch.testing.assert_close(final[n : n + 1], state, rtol=0, atol=1e-12)
