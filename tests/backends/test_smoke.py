"""The framework's main path, once."""

from fla.backends import explain, use_backend
from tests.backends.toy import Q, Toy


def test_priority_verifier_toggle_scope(monkeypatch):
    toy = Toy()
    toy.add('a', accepts=lambda self, q: (q.shape[-1] == 8, 'K must be 8'), env_var='FLA_TOY_A')
    assert toy.ran() == 'a'
    assert toy.ran(Q[:, :4], Q) == 'default'
    monkeypatch.setenv('FLA_TOY_A', '0')
    assert toy.ran() == 'default'
    assert explain(toy.f, Q, Q)['a'].verdict == 'disabled'
    with use_backend('a', op=toy.op):
        assert toy.ran() == 'a'
