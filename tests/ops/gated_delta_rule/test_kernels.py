"""What only the kernels of the gated delta rule have, interpreted. What both delta rules have: tests/ops/test_kernels.py."""

import pytest
import torch

pytest.importorskip('triton')
from fla.backends import NoBackendError
from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
from tests import bounds
from tests.ops.delta_rules import FLAGS, case
from tests.ops.kernels import FP32, call

pytestmark = pytest.mark.interpreted


@pytest.mark.parametrize('extra', [('gk',), ('gv',), ('gk', 'gv')], ids='+'.join)
def test_gates_of_channels_in_decoding(extra):
    """The other gates of `fused_recurrent_gated_delta_rule`, against the reference in float64."""
    given = case(fused_recurrent_gated_delta_rule, T=5, lens=[2, 0, 3], HV=2, K=20, V=12, **FLAGS)
    for name in extra:
        width = 20 if name == 'gk' else 12
        given.tensors[name] = -torch.rand(1, 5, 2, width)
    exact = call(
        fused_recurrent_gated_delta_rule,
        given.with_tensors(**{n: x.double() for n, x in given.tensors.items()}),
        'reference',
    )
    found = call(fused_recurrent_gated_delta_rule, given)
    for right, got in zip(exact, found, strict=True):
        assert bounds.relative_rms(right, got) <= bounds.of_reference(FP32)[0]
        assert bounds.worst_row(right, got) <= bounds.of_reference(FP32)[1]
    # there is no gradient of these gates in Triton
    given.tensors['v'].requires_grad_()
    with torch.no_grad():
        assert torch.equal(call(fused_recurrent_gated_delta_rule, given)[0], found[0])
    with pytest.raises(NoBackendError, match='no gradient in Triton'):
        call(fused_recurrent_gated_delta_rule, given)
    # nor where dispatch is off, and no verifier is asked
    with pytest.raises(RuntimeError, match='gk and gv have no gradient in Triton: leave backends on'):
        given.call(fused_recurrent_gated_delta_rule.__wrapped__)
