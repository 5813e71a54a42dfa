"""Every key of a policy file and every operator of a condition, on operations of the package."""

import textwrap

import pytest
import torch

from fla.backends import (
    BackendRegistry,
    DispatchError,
    NoBackendError,
    breaker,
    explain,
    freeze_dispatch,
    load_policy,
    policy_context,
    prefer_backend,
    refresh,
    telemetry,
    trace,
    use_backend,
    watch_policy,
)
from fla.backends.core.errors import FrozenError
from fla.backends.policy_files import diff_policy, read_policy
from fla.modules.layernorm import rms_norm
from fla.ops.attn import parallel_attn
from fla.ops.kda import chunk_kda
from tests.backends.fallback.test_failure import Broken
from tests.backends.policy_files.test_watch import Events

pytest.importorskip('ruamel.yaml')
pytest.importorskip('pydantic')

SHORT, LONG = (torch.rand(1, T, 2, 16, generator=torch.Generator().manual_seed(T)) for T in (8, 64))


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / 'policy.yaml'
        path.write_text(textwrap.dedent(text), encoding='utf-8')
        return path

    return write


def attention(q=SHORT, **arguments):
    """Returns the backend that ran, after comparing its result with the reference."""
    with trace() as calls:
        o = parallel_attn(q, q, q, **arguments)
    with use_backend('reference', op='attn'):
        wanted = parallel_attn(q.double(), q.double(), q.double(), **arguments)
    torch.testing.assert_close(o.double(), wanted, rtol=1e-5, atol=1e-6)
    return calls.last_backend('attn.parallel_attn')


def test_without_a_policy():
    assert attention() == 'sdpa'


@pytest.mark.parametrize(
    ('text', 'short', 'long'),
    [
        ('prefer: reference', 'reference', 'reference'),
        ('prefer: [vendor, reference]', 'reference', 'reference'),
        ('deny: sdpa', 'reference', 'reference'),
        ('deny: [native]', 'reference', 'reference'),
        ('allow: [sdpa]', 'sdpa', 'sdpa'),
        ('allow: [impl:reference.reference]', 'reference', 'reference'),
        ('order: {attn: [reference, sdpa]}', 'reference', 'reference'),
        ('order: {attn: sdpa, attn.parallel_attn: reference}', 'reference', 'reference'),
        ('order: {kda: reference}', 'sdpa', 'sdpa'),
        ('lock: {attn: reference}\nprefer: sdpa', 'reference', 'reference'),
        ('boost: {attn: {reference: -2000}}', 'reference', 'reference'),
        ('boost: {"attn.*": {reference: -1000, sdpa: 500}}', 'reference', 'reference'),
        ('boost: {kda: {reference: -2000}}', 'sdpa', 'sdpa'),
        ('rules: [{ops: attn, use: reference}]', 'reference', 'reference'),
        ('rules: [{ops: attn.*, use: reference, when: "q.shape[1] >= 64"}]', 'sdpa', 'reference'),
        ('rules: [{ops: "*", use: reference, when: "q.shape[1] > 8 and q.dtype == float32"}]', 'sdpa', 'reference'),
        ('rules: [{ops: attn, use: reference, when: "q.shape[-3] < 64 or cu_seqlens is not None"}]', 'reference', 'sdpa'),
        ('rules: [{ops: attn, use: reference, when: "not q.shape[1] == 64"}]', 'reference', 'sdpa'),
        ('rules: [{ops: attn, use: reference, when: "q.shape[1] != 64"}]', 'reference', 'sdpa'),
        ('rules: [{ops: attn, use: reference, when: "q.shape[1] <= 8"}]', 'reference', 'sdpa'),
        ('rules: [{ops: attn, use: reference, when: "4 < q.shape[1] < 16"}]', 'reference', 'sdpa'),
        ('rules: [{ops: attn, use: reference, when: "q.shape[1] in (32, 64)"}]', 'sdpa', 'reference'),
        ('rules: [{ops: attn, use: reference, when: "q.shape[1] not in (32, 64)"}]', 'reference', 'sdpa'),
        ("""rules: [{ops: attn, use: reference, when: "q.device.type == 'cpu' and g is None"}]""", 'reference', 'reference'),
        ("""rules: [{ops: attn, use: reference, when: "q.device.type == 'cuda'"}]""", 'sdpa', 'sdpa'),
        ('rules: [{ops: attn, use: reference, when: "q.dtype in (bfloat16, float16)"}]', 'sdpa', 'sdpa'),
        (
            """
            rules:
            - {ops: attn, use: sdpa, when: "q.shape[1] >= 64", priority: 2}
            - {ops: attn.parallel_attn, use: reference, when: "q.shape[1] >= 8", priority: 1}
            """,
            'reference',
            'reference',
        ),
        ('rules: [{ops: attn, use: flash_attn}]', 'sdpa', 'sdpa'),  # a backend that cannot run is skipped
        ('require_first: true', 'sdpa', 'sdpa'),
        ('strict: true\ncheck_values: true\non_error: fallback\nbreaker: {threshold: 2}', 'sdpa', 'sdpa'),
    ],
)
def test_the_file_decides_who_serves_attention(write, text, short, long):
    load_policy(write(text))
    assert (attention(), attention(LONG)) == (short, long)
    assert (explain(parallel_attn, SHORT, SHORT, SHORT).winner, explain(parallel_attn, LONG, LONG, LONG).winner) == (
        short,
        long,
    )


def test_an_empty_allow_list_raises(write):
    load_policy(write('allow: []'))
    for call in (lambda: parallel_attn(SHORT, SHORT, SHORT), lambda: rms_norm(SHORT, torch.ones(16))):
        with pytest.raises(NoBackendError, match='allow list'):
            call()


def test_kda_can_be_locked(write):
    path = write('lock: {kda.chunk_kda: reference}')
    load_policy(path)
    arguments = SHORT, SHORT, SHORT, -SHORT, SHORT[..., 0]
    with prefer_backend('default'), trace() as calls:
        chunk_kda(*arguments)
    assert calls.last_backend('kda.chunk_kda') == 'reference'
    with pytest.raises(DispatchError, match=f'locked by {path}:1'), prefer_backend('default', op='kda'):
        pass


def test_diff_policy_predicts_what_a_file_does(write):
    path = write('rules: [{ops: attn, use: reference, when: "window_size is not None"}]')
    with trace() as calls:
        for window in (None, 4, 4):
            parallel_attn(SHORT, SHORT, SHORT, window_size=window)
        rms_norm(SHORT, torch.ones(16))
    (change,) = diff_policy(None, path, calls)
    assert (change.function, change.times, change.old, change.new) == ('attn.parallel_attn', 2, 'sdpa', 'reference')
    with policy_context(read_policy(path)):
        assert attention(window_size=4) == 'reference'


def test_a_watched_file_is_reloaded(write):
    pytest.importorskip('watchfiles')
    reloads = Events()
    with watch_policy(write('deny: sdpa'), debounce=0.05, on_reload=reloads):
        assert attention() == 'reference'
        write('deny: reference')
        reloads.wait(1)
        assert attention() == 'sdpa'


@pytest.mark.parametrize(
    ('variables', 'ran'),
    [
        ({'FLA_PREFER': 'reference'}, 'reference'),
        ({'FLA_PREFER': 'sdpa|reference'}, 'sdpa'),
        ({'FLA_PER_OP': 'attn=reference|sdpa'}, 'reference'),
        ({'FLA_PER_OP': 'attn=sdpa;attn.parallel_attn=reference'}, 'reference'),
        ({'FLA_PER_OP': 'kda=reference'}, 'sdpa'),
        ({'FLA_ALLOW_BACKENDS': 'reference|default'}, 'reference'),
        ({'FLA_DENY_BACKENDS': 'native'}, 'reference'),
        ({'FLA_DENY_BACKENDS': 'vendor'}, 'sdpa'),
        ({'FLA_SDPA': '0'}, 'reference'),
        ({'FLA_REQUIRE_FIRST': '1'}, 'sdpa'),
        ({'FLA_STRICT': '1', 'FLA_CHECK_VALUES': '1', 'FLA_ON_ERROR': 'fallback', 'FLA_DISPATCH_TRACE': '0'}, 'sdpa'),
        ({'FLA_PREFER': 'sdpa', 'FLA_PER_OP': 'attn=reference'}, 'reference'),  # an order by name ranks higher
    ],
)
def test_the_environment_decides_who_serves_attention(monkeypatch, variables, ran):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    refresh()
    assert attention() == ran


def test_variables_override_the_environments_file(write, monkeypatch):
    monkeypatch.setenv('FLA_DISPATCH_CONFIG', str(write('prefer: reference')))
    refresh()
    assert attention() == 'reference'
    monkeypatch.setenv('FLA_PREFER', 'sdpa')
    refresh()
    assert attention() == 'sdpa'


def test_frozen(write, monkeypatch):
    load_policy(write('prefer: reference'))
    frozen = freeze_dispatch(platforms=('cpu',))
    rows = frozen['selections']['attn.parallel_attn']['cpu']
    assert next(row['backend'] for row in rows if row['out'] is None) == 'reference'
    monkeypatch.setenv('FLA_SDPA', '0')
    with pytest.raises(FrozenError):
        load_policy(write('prefer: sdpa'))
    with trace() as calls:
        parallel_attn(SHORT, SHORT, SHORT)
    assert calls.last_backend('attn') == 'reference'


def test_failures_fall_back_and_open_a_circuit(write, monkeypatch):
    def fails(*args, **kwargs):
        raise Broken

    backend = BackendRegistry('attn').get('sdpa')
    monkeypatch.setattr(type(backend), 'retryable', (Broken,))
    monkeypatch.setattr(type(backend), 'parallel_attn', fails)
    with pytest.raises(Broken):
        parallel_attn(SHORT, SHORT, SHORT)
    load_policy(write('on_error: fallback\nbreaker: {threshold: 2, cooldown: 1000}'))
    with telemetry() as counted:
        for _ in range(3):
            parallel_attn(SHORT, SHORT, SHORT)
    outcomes = {(call['backend'], call['outcome']): call['count'] for call in counted.snapshot()['calls']}
    assert outcomes == {('sdpa', 'failed'): 2, ('sdpa', 'open'): 1, ('reference', 'served'): 3}
    assert breaker(parallel_attn, 'sdpa').state == 'open'
