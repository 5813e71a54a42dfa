"""The delta rules' Triton defaults as Dynamo traces them: one graph, which holds the kernel of a step."""

import pytest
import torch
from torch.utils import _triton

pytest.importorskip('triton')
from fla.ops.launch import triton_call
from tests.ops import kernels
from tests.ops.delta_rules import CHUNKED, FLAGS, FUNCTIONS, RAW, case, name_of


class Traced(Exception):
    pass


@pytest.fixture
def graphs(monkeypatch):
    """The compiled graphs; nothing runs."""
    monkeypatch.setattr(triton_call, 'DEVICES', ('cuda', 'cpu'))
    # Dynamo asks this for a GPU, and without one does not recognise kernels
    monkeypatch.setattr(_triton, 'has_triton', lambda: True)
    torch._dynamo.reset()
    found = []

    def backend(graph, inputs):
        found.append(graph)

        def run(*args):
            raise Traced

        return run

    yield lambda function: (found, torch.compile(function, fullgraph=True, backend=backend))
    torch._dynamo.reset()


@pytest.mark.triton
@pytest.mark.parametrize('options', [{'T': 1, 'B': 2}, {'T': 1, **RAW, **FLAGS}, {'lens': [3, 0, 17], 'initial': False}])
@pytest.mark.parametrize('function', FUNCTIONS, ids=name_of)
def test_one_graph(graphs, function, options):
    given = case(function, dtype=kernels.BF16, H=2, HV=4, K=32, V=32, **options)
    found, compiled = graphs(function.__wrapped__)
    with pytest.raises(Traced), torch.no_grad():
        given.call(compiled)
    assert len(found) == 1
    called = [str(node.target) for node in found[0].graph.nodes if node.op == 'call_function']
    ours = [name for name in called if name.startswith('fla.') or 'triton_kernel_wrapper' in name]
    # chunks are one opaque operator; the kernel of a step is in the graph itself
    wanted = f'fla.{name_of(function)}.default' if function in CHUNKED else 'triton_kernel_wrapper_mutation'
    assert ours == [wanted], called
