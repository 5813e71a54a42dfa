"""The gates by themselves refuse what does not fit, as the operations do."""

import pytest
import torch

from fla.ops.gated_delta_rule import fused_gdn_gate, naive_gdn_gate
from fla.ops.kda import fused_kda_gate, naive_kda_gate, naive_kda_lowerbound_gate

GATES = {
    'gdn': (fused_gdn_gate, naive_gdn_gate),
    'kda': (fused_kda_gate, naive_kda_gate, naive_kda_lowerbound_gate),
}


@pytest.mark.parametrize(
    ('name', 'arguments', 'kind', 'message'),
    [
        ('gdn', (torch.zeros(2, 4), torch.zeros(1)), ValueError, r'A_log must have HV = 4 elements, got shape \[1\]'),
        ('gdn', (torch.zeros(2, 4), torch.zeros(4), torch.zeros(3)), ValueError, 'dt_bias must have HV = 4 elements'),
        ('gdn', (torch.zeros(2, 4).long(), torch.zeros(4)), TypeError, 'g must be float16'),
        ('gdn', (None, torch.zeros(4)), TypeError, "argument 'g' must be a tensor, got None"),
        ('gdn', (torch.zeros(2, 4), [0.0] * 4), TypeError, "'A_log' must be a tensor"),
        ('gdn', (torch.zeros(2, 4), torch.zeros(4).cfloat()), TypeError, 'A_log must be float16'),
        ('kda', (torch.zeros(3, 4), torch.zeros(3), torch.zeros(12).bool()), TypeError, 'dt_bias must be float16'),
        ('kda', (torch.zeros(3, 4), torch.zeros(4)), ValueError, 'A_log must have HV = 3 elements'),
        ('kda', (torch.zeros(3, 4), torch.zeros(3), torch.zeros(4)), ValueError, r'dt_bias must have HV \* K = 12 elements'),
        ('kda', (torch.zeros(4), torch.zeros(4)), ValueError, r'g must be \[\.\.\., HV, K\]'),
    ],
)
def test_wrong_gate_arguments(name, arguments, kind, message):
    for gate in GATES[name]:
        with pytest.raises(kind, match=message):
            gate(*arguments)


def test_gates_that_cannot_be():
    g, A_log = torch.zeros(3, 4), torch.zeros(3)
    for bound in (5.0, float('nan')):
        with pytest.raises(ValueError, match='lower_bound must be negative and finite'):
            fused_kda_gate(g, A_log, None, bound)
    with pytest.raises(ValueError, match=r'A_log must be \[HV\] = \[3\], or lower_bound be given'):
        fused_kda_gate(g, None)
    with pytest.raises(TypeError, match='output_dtype must be'):
        fused_gdn_gate(g, torch.zeros(4), output_dtype=torch.int32)
