"""Numbers that do not fit: more than 65,535 heads, 2^20 steps, offsets beyond 2^31. The largest need up to 72 GiB of a GPU:
run this file by itself, without -n."""

import pytest
import torch

pytest.importorskip('triton')
from tests import bounds
from tests.ops.delta_rules import CHUNKED, FUNCTIONS, Case, definition, name_of
from tests.ops.kernels import BF16, bound, by_chunks, call, operation

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
every_function = pytest.mark.parametrize('function', FUNCTIONS, ids=name_of)
every_chunked = pytest.mark.parametrize('function', CHUNKED, ids=name_of)
GIB = 2**30


@pytest.fixture(autouse=True)
def memory():
    """Each test finds and leaves the GPU empty."""
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


def needs(gib: float) -> None:
    free = torch.cuda.mem_get_info()[0] / GIB
    if free < gib:
        pytest.skip(f'needs {gib:.0f} GiB of GPU memory, {free:.0f} are free')


def made(function, *, B=1, T, H, K, V, lens=None) -> Case:
    """Inputs that are made on the GPU: a CPU would take minutes. The norm of k is taken in the kernel."""
    generator = torch.Generator('cuda').manual_seed(0)

    def normal(*shape, dtype=BF16):
        return torch.randn(shape, dtype=dtype, device='cuda', generator=generator)

    kda = operation(function) == 'kda'
    g = normal(B, T, H, *([K] if kda else []), dtype=torch.float32)
    beta = torch.rand((B, T, H), device='cuda', generator=generator)
    tensors = {'q': normal(B, T, H, K), 'k': normal(B, T, H, K), 'v': normal(B, T, H, V)}
    # in place, as g is the largest
    tensors |= {'g': g.sigmoid_().log_().clamp_(min=-8), 'beta': beta}
    cu_seqlens = None if lens is None else torch.tensor([0, *lens]).cumsum(0).int().cuda()
    tensors['initial_state'] = normal(B if lens is None else len(lens), H, K, V, dtype=torch.float32)
    return Case(tensors, cu_seqlens, {'use_qk_l2norm_in_kernel': True}, kda)


def run(function, given: Case, do=None, d_final=None) -> dict[str, torch.Tensor]:
    """o and the final state and, for given gradients of the two, those of the inputs."""
    if do is None:
        with torch.no_grad():
            o, final = call(function, given)
        return {'o': o, 'final': final}
    leaves = {name: x.detach().requires_grad_() for name, x in given.tensors.items()}
    o, final = call(function, given.with_tensors(**leaves))
    got = torch.autograd.grad([o, final], list(leaves.values()), [do, d_final])
    return {'o': o.detach(), 'final': final.detach(), **{f'd{n}': x for n, x in zip(leaves, got, strict=True)}}


def rows(x: torch.Tensor, places: list[int]) -> torch.Tensor:
    return x[torch.tensor(places, device=x.device)]


def compare(function, expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    """Within the bounds of the kernels, by relative RMS."""
    assert expected.keys() == found.keys()
    wrong = {}
    for name, x in expected.items():
        error, most = bounds.relative_rms(x, found[name]), bound(name, BF16, found[name].dtype, function not in CHUNKED)[0]
        if not error <= most:
            wrong[name] = f'{error:.1e} (bound {most:.1e})'
    assert not wrong


# -- many heads -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('T', [2, 70])
@every_function
def test_more_heads_than_a_grid_has_rows(function, T):
    """B * H is 70,400. Rows of the batch are compared with float64: the first, the last, those around 65,535."""
    needs(4)
    places = [0, 1, 511, 1023, 1024, 1099]
    given = made(function, B=1100, T=T, H=64, K=16, V=16)
    o, final = torch.randn_like(given.tensors['v']), torch.randn_like(given.tensors['initial_state'])
    backward = (o, final) if function in CHUNKED else ()
    found = {name: rows(x, places) for name, x in run(function, given, *backward).items()}
    part = given.with_tensors(**{name: rows(x, places).double() for name, x in given.tensors.items()})
    compare(function, exactly(function, part, *(rows(x, places).double() for x in backward)), found)


@every_function
def test_more_sequences_than_a_grid_has_rows(function):
    """The same packed: 1,100 sequences of 64 heads, of 0 to 3 steps."""
    needs(4)
    lens = [n % 4 for n in range(1099)] + [3]
    given = made(function, T=sum(lens), H=64, K=16, V=16, lens=lens)
    with torch.no_grad():
        found = run(function, given)
        wide = given.with_tensors(**{name: x.double() for name, x in given.tensors.items()})
        compare(function, exactly(function, wide), found)


def exactly(function, given: Case, do=None, d_final=None) -> dict[str, torch.Tensor]:
    """As `run`, by the reference in float64."""
    leaves = {name: x.requires_grad_(do is not None) for name, x in given.tensors.items()}
    o, final, _ = definition(given, leaves, by_chunks(function))
    found = {'o': o.detach(), 'final': final.detach()}
    if do is not None:
        got = torch.autograd.grad([o, final], list(leaves.values()), [do, d_final])
        found |= {f'd{name}': x for name, x in zip(leaves, got, strict=True)}
    return found


def test_states_beyond_two_to_the_31():
    """Decoding: the states of all sequences are 2.3e9 numbers. The last sequences give what they give alone."""
    needs(24)
    for function in FUNCTIONS:
        if function in CHUNKED:
            continue
        given = made(function, B=2200, T=1, H=64, K=128, V=128)
        assert given.tensors['initial_state'].numel() > 2**31
        whole = run(function, given)
        last = {name: x[-2:].clone() for name, x in whole.items()}
        alone = run(function, given.with_tensors(**{name: x[-2:] for name, x in given.tensors.items()}))
        compare(function, {name: x.double() for name, x in alone.items()}, last)
        del whole, given


# -- many steps -------------------------------------------------------------------------------------------------------------


def split(given: Case, cut: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The tensors before and from a step on, without states."""
    steps = {name: x for name, x in given.tensors.items() if name != 'initial_state'}
    return {name: x[:, :cut] for name, x in steps.items()}, {name: x[:, cut:] for name, x in steps.items()}


def check_end(function, given: Case) -> None:
    """The last steps give what they give from the state before them; the first ones what they give alone."""
    T = given.tensors['q'].shape[1]
    cut = T - 2 * 64 - 5 if function in CHUNKED else T - 5
    cut -= cut % 64
    before, after = split(given, cut)
    whole = run(function, given)
    ends = {'o': whole['o'][:, cut:].clone(), 'final': whole['final']}
    start = whole['o'][:, :256].clone()
    del whole
    state = given.tensors['initial_state']
    head = run(function, Case({**before, 'initial_state': state}, None, given.options, given.per_channel))
    compare(function, {'o': head['o'][:, :256]}, {'o': start})
    tail = run(function, Case({**after, 'initial_state': head['final']}, None, given.options, given.per_channel))
    compare(function, tail, ends)


def check_gradients(function, given: Case) -> None:
    """The gradients of the whole are those of its two parts, one after the other."""
    T = given.tensors['q'].shape[1]
    cut = (T - 2 * 64 - 5) // 64 * 64
    before, after = split(given, cut)
    state = given.tensors['initial_state']
    generator = torch.Generator('cuda').manual_seed(1)
    do = torch.randn(given.tensors['v'].shape, dtype=BF16, device='cuda', generator=generator)
    d_final = torch.randn(state.shape, device='cuda', generator=generator)
    whole = run(function, given, do, d_final)
    places = {'start': slice(0, 256), 'before the cut': slice(cut - 256, cut), 'end': slice(cut, T)}
    kept = {
        where: {name: x[:, place].clone() for name, x in whole.items() if name not in ('final', 'dinitial_state')}
        for where, place in places.items()
    }
    kept['end']['final'], kept['start']['dinitial_state'] = whole['final'], whole['dinitial_state']
    del whole
    parts = [Case(part, None, given.options, given.per_channel) for part in (before, after)]
    middle = run(function, parts[0].with_tensors(initial_state=state))['final']
    tail = run(function, parts[1].with_tensors(initial_state=middle), do[:, cut:], d_final)
    d_middle = tail.pop('dinitial_state')
    compare(function, tail, kept['end'])
    head = run(function, parts[0].with_tensors(initial_state=state), do[:, :cut], d_middle)
    first = {name: x[:, :256] for name, x in head.items() if name not in ('final', 'dinitial_state')}
    compare(function, {**first, 'dinitial_state': head['dinitial_state']}, kept['start'])
    last = {name: x[:, cut - 256 : cut] for name, x in head.items() if name not in ('final', 'dinitial_state')}
    compare(function, last, kept['before the cut'])


@pytest.mark.parametrize(('H', 'K', 'V'), [(1, 64, 64), (2, 128, 128)])
@every_function
def test_a_million_steps(function, H, K, V):
    needs(20)
    check_end(function, made(function, T=2**20, H=H, K=K, V=V))


@pytest.mark.parametrize(('H', 'K', 'V'), [(1, 64, 64), (2, 128, 128)])
@every_chunked
def test_a_million_steps_backward(function, H, K, V):
    needs(30)
    check_gradients(function, made(function, T=2**20, H=H, K=K, V=V))


@every_function
def test_inputs_beyond_two_to_the_31(function):
    """q and k have 2.3e9 numbers. V is small, or the rest would not fit."""
    needs(72)
    given = made(function, T=2**20, H=17, K=128, V=16)
    assert given.tensors['q'].numel() > 2**31
    check_end(function, given)


@every_chunked
def test_states_of_chunks_beyond_two_to_the_31(function):
    """The states before each chunk have 2.4e9 numbers; q, 1.2e9."""
    needs(64)
    check_end(function, made(function, T=2**20, H=9, K=128, V=128))


def test_gradients_beyond_two_to_the_31():
    """Of the gated delta rule: those of KDA's gates alone would fill the rest of the GPU."""
    needs(72)
    check_gradients(CHUNKED[0], made(CHUNKED[0], T=2**20, H=17, K=128, V=16))
