"""Calls that must be refused, by name, before any backend is asked; and the signatures and import paths that users hold."""

import importlib
import inspect

import pytest
import torch

from fla.backends import Policy, policy_context, trace, use_backend
from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from fla.ops.kda import chunk_kda, fused_recurrent_kda
from fla.ops.recurrence.arguments import Inputs, Options, compile_key
from tests import process
from tests.ops.delta_rules import CHUNKED, FUNCTIONS, KDA, RAW, case, name_of
from tests.tables import table

every_function = pytest.mark.parametrize('function', FUNCTIONS, ids=name_of)
every_chunked = pytest.mark.parametrize('function', CHUNKED, ids=name_of)

none, false = None, False
SIGNATURES = {
    chunk_gated_delta_rule: {
        'q': ...,
        'k': ...,
        'v': ...,
        'g': ...,
        'beta': ...,
        'scale': none,
        'initial_state': none,
        'output_final_state': false,
        'use_qk_l2norm_in_kernel': false,
        'use_beta_sigmoid_in_kernel': false,
        'allow_neg_eigval': false,
        'state_v_first': false,
        'cu_seqlens': none,
        'cu_seqlens_cpu': none,
        'chunk_indices': none,
        'cp_context': none,
        'keyword_only': ...,
        'use_gate_in_kernel': false,
        'A_log': none,
        'dt_bias': none,
        'chunk_size': none,
    },
    fused_recurrent_gated_delta_rule: {
        'q': ...,
        'k': ...,
        'v': ...,
        'g': none,
        'gk': none,
        'gv': none,
        'beta': none,
        'scale': none,
        'initial_state': none,
        'output_final_state': false,
        'use_qk_l2norm_in_kernel': false,
        'use_beta_sigmoid_in_kernel': false,
        'allow_neg_eigval': false,
        'state_v_first': false,
        'cu_seqlens': none,
        'keyword_only': ...,
        'use_gate_in_kernel': false,
        'A_log': none,
        'dt_bias': none,
    },
    chunk_kda: {
        'q': ...,
        'k': ...,
        'v': ...,
        'g': ...,
        'beta': ...,
        'scale': none,
        'initial_state': none,
        'output_final_state': false,
        'use_qk_l2norm_in_kernel': false,
        'use_gate_in_kernel': false,
        'use_beta_sigmoid_in_kernel': false,
        'allow_neg_eigval': false,
        'safe_gate': false,
        'lower_bound': none,
        'disable_recompute': false,
        'return_intermediate_states': false,
        'state_v_first': false,
        'cu_seqlens': none,
        'cu_seqlens_cpu': none,
        'cp_context': none,
        'keyword_only': ...,
        'A_log': none,
        'dt_bias': none,
        'chunk_size': none,
    },
    fused_recurrent_kda: {
        'q': ...,
        'k': ...,
        'v': ...,
        'g': ...,
        'beta': ...,
        'A_log': none,
        'dt_bias': none,
        'scale': none,
        'initial_state': none,
        'output_final_state': false,
        'use_qk_l2norm_in_kernel': false,
        'use_gate_in_kernel': false,
        'use_beta_sigmoid_in_kernel': false,
        'allow_neg_eigval': false,
        'lower_bound': none,
        'state_v_first': false,
        'cu_seqlens': none,
    },
}


@every_function
def test_signature(function):
    wanted, kind = [], inspect.Parameter.POSITIONAL_OR_KEYWORD
    for name, default in SIGNATURES[function].items():
        if name == 'keyword_only':
            kind = inspect.Parameter.KEYWORD_ONLY
        else:
            wanted.append((name, inspect.Parameter.empty if default is ... else default, kind))
    assert [(p.name, p.default, p.kind) for p in inspect.signature(function).parameters.values()] == wanted


GDN_NAMES = {
    'chunk': 'chunk_gated_delta_rule chunk_gdn',
    'fused_recurrent': 'fused_recurrent_gated_delta_rule',
    'naive': 'naive_recurrent_gated_delta_rule',
    'gate': 'naive_gdn_gate fused_gdn_gate',
}
KDA_NAMES = {
    'chunk': 'chunk_kda',
    'fused_recurrent': 'fused_recurrent_kda',
    'naive': 'naive_recurrent_kda',
    'gate': 'naive_kda_gate naive_kda_lowerbound_gate fused_kda_gate',
}


@pytest.mark.parametrize(('package', 'names'), [('gated_delta_rule', GDN_NAMES), ('kda', KDA_NAMES)])
def test_import_paths(package, names):
    whole = importlib.import_module(f'fla.ops.{package}')
    for module, functions in names.items():
        part = importlib.import_module(f'fla.ops.{package}.{module}')
        for name in functions.split():
            assert getattr(part, name) is getattr(whole, name)
    if package == 'gated_delta_rule':
        assert whole.chunk_gdn is whole.chunk_gated_delta_rule


def naive_parameters(path):
    module, _, name = path.rpartition('.')
    return list(inspect.signature(getattr(importlib.import_module(module), name)).parameters)


def test_signatures_of_definitions_and_gates():
    steps = naive_parameters('fla.ops.gated_delta_rule.naive.naive_recurrent_gated_delta_rule')
    assert steps[:8] == ['q', 'k', 'v', 'beta', 'g', 'scale', 'initial_state', 'output_final_state']
    assert naive_parameters('fla.ops.kda.naive.naive_recurrent_kda')[:5] == ['q', 'k', 'v', 'g', 'beta']
    assert naive_parameters('fla.ops.gated_delta_rule.gate.naive_gdn_gate') == ['g', 'A_log', 'dt_bias']
    assert naive_parameters('fla.ops.kda.gate.naive_kda_gate') == ['g', 'A_log', 'dt_bias']
    bound = naive_parameters('fla.ops.kda.gate.naive_kda_lowerbound_gate')
    assert bound == ['g', 'A_log', 'dt_bias', 'lower_bound']


def lens(*values, dtype=torch.int32, **more):
    return torch.tensor(values, dtype=dtype, **more)


def grow(name, dim):
    return lambda x: {name: torch.cat((x[name], x[name].narrow(dim, 0, 1)), dim)}


def at(name, change):
    return lambda x: {name: change(x[name])}


# what is changed in a good call of B=1, T=6, H=1, HV=2, K=4, V=3; the error; what its message holds
TENSORS = ('q', 'k', 'v', 'g', 'beta', 'initial_state')
BAD = {
    **{
        f'scale is {value}': (lambda x, value=value: {'scale': value}, ValueError, f'scale must be finite, got {value}')
        for value in (float('inf'), -float('inf'), float('nan'))
    },
    **{f'{n} misses a dimension': (at(n, lambda x: x[0]), ValueError, n) for n in TENSORS},
    **{f'{n} has one more dimension': (at(n, lambda x: x[None]), ValueError, n) for n in TENSORS},
    **{f'{n} is longer than the rest': (grow(n, 1), ValueError, 'k|v|g|beta|initial_state') for n in TENSORS},
    **{f'{n} has one more sequence': (grow(n, 0), ValueError, 'k|v|g|beta|initial_state') for n in TENSORS},
    **{f'{n} has one more head': (grow(n, 2), ValueError, 'k |heads of v|g|beta|initial_state') for n in TENSORS},
    **{f'{n} is on another device': (at(n, lambda x: x.to('meta')), ValueError, f"'{n}'|'k'.*'q'") for n in TENSORS},
    **{f'{n} is an integer': (at(n, torch.Tensor.int), TypeError, n) for n in TENSORS},
    **{f'{n} is complex': (at(n, lambda x: x.to(torch.complex64)), TypeError, n) for n in TENSORS},
    **{f'{n} is narrow': (at(n, torch.Tensor.bfloat16), TypeError, n) for n in TENSORS},
    **{f'{n} is wide': (at(n, torch.Tensor.double), TypeError, 'q|k|v|g|beta|initial_state') for n in TENSORS},
    **{f'{n} is sparse': (at(n, torch.Tensor.to_sparse), TypeError, f"'{n}' must be a dense tensor") for n in TENSORS},
    **{
        f'{n} is nested': (at(n, lambda x: torch.nested.nested_tensor(list(x))), TypeError, f"'{n}' must be a dense tensor")
        for n in TENSORS
    },
    **{f'{n} is a list': (at(n, torch.Tensor.tolist), TypeError, n) for n in TENSORS},
    **{f'{n} is an array': (at(n, torch.Tensor.numpy), TypeError, n) for n in TENSORS},
    'k is wider than q': (grow('k', 3), ValueError, 'k must be shaped like q'),
    'q and k are wider than the state': (lambda x: {**grow('q', 3)(x), **grow('k', 3)(x)}, ValueError, 'g|initial_state'),
    'v is wider than the state': (grow('v', 3), ValueError, 'initial_state'),
    'the state is turned': (at('initial_state', lambda x: x.transpose(-1, -2)), ValueError, 'initial_state'),
    'the state is not turned': (lambda x: {'state_v_first': True}, ValueError, 'initial_state'),
    'v has no heads': (at('v', lambda x: x[:, :, :0]), ValueError, 'heads of v'),
    'q has no heads': (lambda x: {n: x[n][:, :, :0] for n in 'qk'}, ValueError, 'heads of v'),
    'K is 0': (lambda x: {n: x[n][..., :0] for n in 'qk'}, ValueError, 'head dim of q'),
    'K is 257': (lambda x: {n: x[n][..., :1].expand(-1, -1, -1, 257) for n in 'qk'}, ValueError, 'head dim of q'),
    'V is 0': (at('v', lambda x: x[..., :0]), ValueError, 'head dim of v'),
    'V is 257': (at('v', lambda x: x[..., :1].expand(-1, -1, -1, 257)), ValueError, 'head dim of v'),
    'cu_seqlens is a list': (lambda x: {'cu_seqlens': [0, 6]}, TypeError, 'cu_seqlens'),
    'cu_seqlens is a matrix': (lambda x: {'cu_seqlens': lens(0, 6)[None]}, ValueError, 'cu_seqlens'),
    'cu_seqlens has no dimension': (lambda x: {'cu_seqlens': torch.tensor(6)}, ValueError, 'cu_seqlens'),
    'cu_seqlens is empty': (lambda x: {'cu_seqlens': lens()}, ValueError, 'cu_seqlens'),
    'cu_seqlens is int16': (lambda x: {'cu_seqlens': lens(0, 6, dtype=torch.int16)}, TypeError, 'cu_seqlens'),
    'cu_seqlens is float': (lambda x: {'cu_seqlens': lens(0, 6, dtype=torch.float32)}, TypeError, 'cu_seqlens'),
    'cu_seqlens is bool': (lambda x: {'cu_seqlens': lens(0, 1, dtype=torch.bool)}, TypeError, 'cu_seqlens'),
    'cu_seqlens is elsewhere': (lambda x: {'cu_seqlens': lens(0, 6, device='meta')}, ValueError, 'cu_seqlens'),
    'cu_seqlens starts at 1': (lambda x: {'cu_seqlens': lens(1, 6)}, ValueError, 'cu_seqlens must start at 0'),
    'cu_seqlens starts below 0': (lambda x: {'cu_seqlens': lens(-1, 6)}, ValueError, 'cu_seqlens must start at 0'),
    'cu_seqlens ends early': (lambda x: {'cu_seqlens': lens(0, 5)}, ValueError, 'cu_seqlens .*T = 6'),
    'cu_seqlens ends late': (lambda x: {'cu_seqlens': lens(0, 7)}, ValueError, 'cu_seqlens .*T = 6'),
    'cu_seqlens is only 0': (lambda x: {'cu_seqlens': lens(0)}, ValueError, 'cu_seqlens .*T = 6'),
    'cu_seqlens is one number that cannot be read': (
        lambda x: {**{n: y.to('meta') for n, y in x.items()}, 'cu_seqlens': lens(0, device='meta')},
        ValueError,
        'cu_seqlens holds no sequence, but there are T = 6 steps',
    ),
    'cu_seqlens decreases': (lambda x: {'cu_seqlens': lens(0, 4, 2, 6)}, ValueError, 'cu_seqlens must not decrease'),
    'cu_seqlens and a state too few': (lambda x: {'cu_seqlens': lens(0, 2, 6)}, ValueError, 'initial_state'),
    'cu_seqlens and a batch': (
        lambda x: {**{n: x[n].repeat(2, *[1] * (x[n].dim() - 1)) for n in TENSORS}, 'cu_seqlens': lens(0, 6)},
        ValueError,
        'batch must be 1.*B = 2',
    ),
    'A_log is missing': (lambda x: {'use_gate_in_kernel': True}, ValueError, 'A_log'),
    'A_log without raw gates': (lambda x: {'A_log': torch.zeros(2)}, ValueError, 'A_log.*use_gate_in_kernel'),
    'dt_bias without raw gates': (lambda x: {'dt_bias': torch.zeros(2)}, ValueError, 'dt_bias.*use_gate_in_kernel'),
    'A_log is short': (lambda x: {**RAW, 'A_log': torch.zeros(1)}, ValueError, 'A_log'),
    'A_log is an integer': (lambda x: {**RAW, 'A_log': torch.zeros(2).int()}, TypeError, 'A_log'),
    'A_log is sparse': (
        lambda x: {**RAW, 'A_log': torch.zeros(2).to_sparse()},
        TypeError,
        "'A_log' must be a dense tensor",
    ),
    'A_log is a float': (lambda x: {**RAW, 'A_log': 0.5}, TypeError, 'A_log'),
    'A_log is elsewhere': (lambda x: {**RAW, 'A_log': torch.zeros(2, device='meta')}, ValueError, 'A_log'),
    'dt_bias is sparse': (
        lambda x: {**RAW, 'A_log': torch.zeros(2), 'dt_bias': torch.ones(2 * (4 if x['g'].dim() == 4 else 1)).to_sparse()},
        TypeError,
        "'dt_bias' must be a dense tensor",
    ),
    'dt_bias is short': (lambda x: {**RAW, 'A_log': torch.zeros(2), 'dt_bias': torch.zeros(1)}, ValueError, 'dt_bias'),
    'a retired name': (lambda x: {'transpose_state_layout': True}, TypeError, 'transpose_state_layout'),
    'another retired name': (lambda x: {'head_first': False}, TypeError, 'head_first'),
    'a misspelt name': (lambda x: {'output_final_states': True}, TypeError, 'output_final_states'),
}
BAD_CHUNKED = {
    'cp_context': (lambda x: {'cp_context': object()}, NotImplementedError, 'cp_context'),
    'g is None': (lambda x: {'g': None}, TypeError, "'g'"),
    'beta is None': (lambda x: {'beta': None}, TypeError, "'beta'"),
    'chunk_size is odd': (lambda x: {'chunk_size': 48}, ValueError, 'chunk_size'),
    'chunk_size is 0': (lambda x: {'chunk_size': 0}, ValueError, 'chunk_size'),
    'chunk_size is a float': (lambda x: {'chunk_size': 64.0}, ValueError, 'chunk_size'),
    'only cu_seqlens_cpu': (lambda x: {'cu_seqlens_cpu': lens(0, 6)}, ValueError, 'cu_seqlens_cpu'),
    'cu_seqlens_cpu is a list': (
        lambda x: {'cu_seqlens': lens(0, 6), 'cu_seqlens_cpu': [0, 6]},
        TypeError,
        'cu_seqlens_cpu',
    ),
    'cu_seqlens_cpu is float': (
        lambda x: {'cu_seqlens': lens(0, 6), 'cu_seqlens_cpu': lens(0, 6, dtype=torch.float32)},
        TypeError,
        'cu_seqlens_cpu',
    ),
    'cu_seqlens_cpu is longer': (
        lambda x: {'cu_seqlens': lens(0, 6), 'cu_seqlens_cpu': lens(0, 2, 6)},
        ValueError,
        'cu_seqlens_cpu',
    ),
    'cu_seqlens_cpu is elsewhere': (
        lambda x: {'cu_seqlens': lens(0, 6), 'cu_seqlens_cpu': lens(0, 6, device='meta')},
        ValueError,
        'cu_seqlens_cpu',
    ),
    'cu_seqlens_cpu says something else': (
        lambda x: {
            'cu_seqlens': lens(0, 2, 6),
            'cu_seqlens_cpu': lens(0, 3, 6),
            'initial_state': x['initial_state'].repeat(2, 1, 1, 1),
        },
        ValueError,
        'cu_seqlens_cpu',
    ),
}
BAD_KDA = {
    'lower_bound is 0': (lambda x: {**RAW, 'lower_bound': 0.0}, ValueError, 'lower_bound'),
    'lower_bound is above 0': (lambda x: {**RAW, 'lower_bound': 5.0}, ValueError, 'lower_bound'),
    'lower_bound is infinite': (lambda x: {**RAW, 'lower_bound': -float('inf')}, ValueError, 'lower_bound'),
    'lower_bound is beyond 64 bits': (lambda x: {**RAW, 'lower_bound': -(2**64)}, ValueError, 'lower_bound.*64 bits'),
    'lower_bound is NaN': (lambda x: {**RAW, 'lower_bound': float('nan')}, ValueError, 'lower_bound'),
    'lower_bound is a string': (lambda x: {**RAW, 'lower_bound': '-5'}, TypeError, 'lower_bound'),
    'A_log is nested': (
        lambda x: {**RAW, 'lower_bound': -5.0, 'A_log': torch.nested.nested_tensor([torch.zeros(1)] * 3)},
        TypeError,
        "argument 'A_log' must be a dense tensor",
    ),
    'lower_bound without raw gates': (lambda x: {'lower_bound': -5.0}, ValueError, 'lower_bound.*use_gate_in_kernel'),
    'dt_bias is wide': (lambda x: {**RAW, 'lower_bound': -5.0, 'dt_bias': torch.zeros(8).double()}, TypeError, 'dt_bias'),
    'dt_bias of a value a head': (
        lambda x: {**RAW, 'lower_bound': -5.0, 'dt_bias': torch.zeros(2)},
        ValueError,
        r'dt_bias must have HV \* K',
    ),
}
BAD_CHUNK_KDA = {
    'safe_gate without lower_bound': (
        lambda x: {**RAW, 'safe_gate': True, 'A_log': torch.zeros(2)},
        ValueError,
        'safe_gate',
    ),
    'safe_gate below -5': (lambda x: {**RAW, 'safe_gate': True, 'lower_bound': -5.5}, ValueError, 'safe_gate'),
    'intermediate states without cu_seqlens_cpu': (
        lambda x: {'return_intermediate_states': True, 'cu_seqlens': lens(0, 6)},
        ValueError,
        'cu_seqlens_cpu',
    ),
    'intermediate states with a gradient': (
        lambda x: {'return_intermediate_states': True, 'v': x['v'].clone().requires_grad_()},
        ValueError,
        'no_grad',
    ),
    'intermediate states with a gradient of A_log': (
        lambda x: {**RAW, 'return_intermediate_states': True, 'A_log': torch.zeros(2, requires_grad=True)},
        ValueError,
        'no_grad',
    ),
}
BAD_BY_FUNCTION = {
    chunk_gated_delta_rule: {
        **BAD,
        **BAD_CHUNKED,
        'chunk_indices is a list': (lambda x: {'chunk_indices': [[0, 0]]}, TypeError, 'chunk_indices'),
        'chunk_indices is a vector': (lambda x: {'chunk_indices': torch.zeros(2).int()}, ValueError, 'chunk_indices'),
    },
    fused_recurrent_gated_delta_rule: {
        **BAD,
        'dt_bias is wide': (
            lambda x: {**RAW, 'A_log': torch.zeros(2), 'dt_bias': torch.zeros(2).double()},
            TypeError,
            'dt_bias',
        ),
        'raw gates without a gate': (lambda x: {**RAW, 'g': None, 'A_log': torch.zeros(2)}, ValueError, 'raw gate g'),
        'gk is a gate of heads': (lambda x: {'gk': x['g']}, ValueError, 'gk'),
        'gv is shaped like gk': (lambda x: {'gv': torch.zeros(1, 6, 2, 4)}, ValueError, 'gv'),
        'gv is narrow': (lambda x: {'gv': torch.zeros(1, 6, 2, 3).half()}, TypeError, 'gv'),
    },
    chunk_kda: {**BAD, **BAD_CHUNKED, **BAD_KDA, **BAD_CHUNK_KDA},
    fused_recurrent_kda: {**BAD, **BAD_KDA},
}
ALL_BAD = [(f, name) for f, cases in BAD_BY_FUNCTION.items() for name in cases]


def good(function):
    return case(function, T=6, HV=2, K=4, V=3).tensors


def refuse(function, name):
    change, error, message = BAD_BY_FUNCTION[function][name]
    arguments = good(function)
    with trace() as t, pytest.raises(error, match=message):
        function(**{**arguments, **change(arguments)})
    assert not len(t), 'a backend ran'


@table(('function', 'name'), ALL_BAD, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_refused(function, name):
    refuse(function, name)


@pytest.mark.interpreted
@pytest.mark.parametrize('function', FUNCTIONS, ids=name_of)
def test_refused_alike_by_the_default(function):
    """Where the Triton kernels would serve the call, the same errors come before them."""
    pytest.importorskip('triton')
    for name in BAD_BY_FUNCTION[function]:
        with use_backend('default'):
            refuse(function, name)


@every_function
def test_refused_while_compiling(function):
    compiled = torch.compile(function, backend='eager', fullgraph=True)
    arguments = good(function)
    with pytest.raises(Exception, match='beta must be'):
        compiled(**{**arguments, 'beta': arguments['beta'][:, :5]})
    torch._dynamo.reset()


@every_function
def test_every_dtype_that_is_allowed_beside_q(function):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        given = case(function, T=3, HV=2, dtype=dtype, gate_dtype=dtype, **RAW)
        for name in ('g', 'beta', 'A_log', 'dt_bias', 'initial_state'):
            for other in {dtype, torch.float32}:
                o, final = given.with_tensors(**{name: given.tensors[name].to(other)}).call(function)
                assert (o.dtype, final.dtype) == (dtype, torch.float32)


@every_function
def test_values_are_checked_on_request(function):
    arguments = good(function)
    bad = {**arguments, 'g': -arguments['g']}
    function(**bad)
    raw = {'lower_bound': -5.0} if function in KDA else {'A_log': torch.zeros(2)}
    with policy_context(Policy(check_values=True)):
        function(**arguments)
        function(**bad, use_gate_in_kernel=True, **raw)
        with pytest.raises(ValueError, match='g must be at most 0'):
            function(**bad)


@every_function
def test_cu_seqlens_inside_a_transform_are_not_read(function):
    """Content is only checked where reading it is free; what is out of range then is not read out of bounds."""
    arguments = good(function)
    del arguments['initial_state']
    many = torch.tensor([[0, 3, 6], [0, 9, 20], [-4, 3, 6]])
    o = torch.vmap(lambda cu: function(**arguments, cu_seqlens=cu)[0])(many)
    torch.testing.assert_close(o[0], function(**arguments, cu_seqlens=many[0])[0])
    assert o.isfinite().all()


def test_the_default_without_dispatch_says_what_it_needs():
    code = """
import torch
from fla.ops.gated_delta_rule import *
from fla.ops.kda import *
x = torch.ones(1, 2, 1, 4)
for f in (chunk_gated_delta_rule, fused_recurrent_gated_delta_rule, chunk_kda, fused_recurrent_kda):
    try:
        f(x, x, x, g=-x if 'kda' in f.__name__ else -x[..., 0], beta=x[..., 0])
    except (RuntimeError, ImportError) as error:
        assert f.__name__ in str(error) and 'reference' in str(error), error
    else:
        raise AssertionError(f)
"""
    done = process.run(code, FLA_DISABLE_BACKEND_DISPATCH='1', TRITON_INTERPRET='0')
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize('scale', ['a', True, torch.tensor([1.0, 2.0])], ids=['text', 'bool', 'tensor'])
@every_function
def test_scale_is_a_number(function, scale):
    with pytest.raises(TypeError, match='scale must be a number or None'):
        case(function, T=3).call(function, scale=scale)


@pytest.mark.parametrize('scale', [1, 0.5])
@every_function
def test_scale_of_either_kind(function, scale):
    given = case(function, T=3)
    o, _ = given.call(function, scale=scale)
    torch.testing.assert_close(o * 2, given.call(function, scale=2.0 * scale)[0])


def test_no_kernel_is_compiled_for_a_scale():
    x = torch.zeros(1, 2, 3, 4)
    inputs = Inputs(x, x, x, x, x[..., 0])
    one, other, *different = (
        *(Options(0.5), Options(0.25)),
        *(Options(0.5, state_v_first=True), Options(0.5, lower_bound=-5.0, use_gate_in_kernel=True)),
        Options(0.5, use_gate_in_kernel=True),
    )
    assert compile_key(inputs, one) == compile_key(inputs, other)
    assert len({compile_key(inputs, options) for options in (one, *different)}) == 4
