"""What importing costs and touches: nothing."""

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

import fla
from tests import process

ROOT = str(Path(fla.__file__).parents[1])


def python(source, **variables):
    """Runs source in a process of its own, without any FLA_* variable but those given."""
    done = process.run(source, **variables)
    assert done.returncode == 0, done.stderr
    return done


def cold_python(source):
    """The same in a process that has imported nothing."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith('FLA_')}
    command = [sys.executable, '-c', dedent(source)]
    done = subprocess.run(
        command, env={**environ, 'PYTHONPATH': ROOT}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_what_few_ask_for_is_imported_when_they_do():
    cold_python(
        """
        import sys
        import fla.backends as door

        names = ('policy_files.watch', 'policy_files.load', 'policy_files.diff', 'tuning.measuring', 'tuning.measurements')
        late = {f'fla.backends.{name}' for name in names}
        assert not late & set(sys.modules), late & set(sys.modules)
        for name in door.__all__:
            assert getattr(door, name) is getattr(door, name)
        assert late <= set(sys.modules)
        assert callable(door.measure) and callable(door.watch_policy)
        assert set(door.__all__) <= set(dir(door))
        """
    )


def test_importing_loads_nothing_heavy_and_touches_no_device():
    cold_python(
        """
        import sys
        import torch

        def driver(*_):
            raise AssertionError('asked for a device')

        for name in ('_cuda_getDeviceCount', '_cuda_init', '_xpu_getDeviceCount', '_accelerator_getAccelerator'):
            if hasattr(torch._C, name):
                setattr(torch._C, name, driver)
        for name in ('is_available', 'device_count', 'init', '_lazy_init', 'current_device', 'get_device_capability'):
            setattr(torch.cuda, name, driver)
        torch.accelerator.is_available = torch.accelerator.current_accelerator = driver

        before = set(sys.modules)
        import fla
        assert set(sys.modules) - before <= {'fla'}, 'import fla imports nothing'
        import fla.ops
        import fla.utils
        import fla.backends
        new = {name for name in set(sys.modules) - before if not name.startswith(('fla', 'packaging'))}
        heavy = {name for name in new if name.split('.')[0] in ('torch', 'triton', 'numpy', 'tilelang', 'pydantic', 'ruamel',
                 'rich', 'watchfiles', 'transformers', 'setuptools', 'pkg_resources')}
        assert not heavy, heavy
        assert not {name for name in ('triton', 'torch._dynamo', 'torch._inductor', 'torch.distributed.tensor',
                                      'torch._subclasses.fake_tensor') if name in new}
        assert len(new) < 20, new
        loaded = {name for name in sys.modules if name.startswith('fla.ops.') and not name.startswith('fla.backends')}
        assert not loaded, loaded
        assert not torch.cuda.is_initialized()
        """
    )


def test_operations_modules_and_layers_load_nothing_heavy():
    """Dynamo and Triton take three times as long as all else, and most processes compile nothing."""
    cold_python(
        """
        import sys
        import torch

        before = set(sys.modules)
        import fla.layers
        import fla.modules
        import fla.ops.attn
        import fla.ops.gated_delta_rule
        import fla.ops.kda
        heavy = ('torch', 'triton', 'tilelang', 'numpy', 'sympy', 'transformers')
        new = sorted(name for name in set(sys.modules) - before if name.split('.')[0] in heavy)
        assert not new, new
        """
    )


BAD = {
    'FLA_DISABLE_BACKEND_DISPATCH': 'maybe',
    'FLA_PER_OP': ';;=;x;kda=|;no_such_operation=a;kda.no_such=b',
    'FLA_PREFER': '|,|no_such_backend,,\u00e9',
    'FLA_ALLOW_BACKENDS': ' , ',
    'FLA_DENY_BACKENDS': 'no:such:thing',
    'FLA_STRICT': '2',
    'FLA_ON_ERROR': 'explode',
    'FLA_REQUIRE_FIRST': '',
    'FLA_CHECK_VALUES': 'ja',
    'FLA_DISPATCH_TRACE': 'none',
    'FLA_DISPATCH_CONFIG': '/no/such/file.yaml',
    'FLA_LOG_LEVEL': 'LOUD',
    'FLA_PLUGIN_MODULES': ',,no.such.module,1 2,.,',
    'FLA_TILELANG': '0x1',
    'FLA_NO_SUCH_VARIABLE': '1',
}

USE = """
import fla
import fla.backends
from fla.backends import BackendRegistry, BaseBackend, dispatch

class A(BaseBackend):
    backend_type = 'a'
    env_var = 'FLA_TILELANG'
    def f(self, x=None):
        return 'a'

BackendRegistry('op_for_import').register(A())

@dispatch('op_for_import')
def f(x=None):
    return 'default'

print(f())
"""


def test_malformed_variables_never_break_the_import_nor_the_call():
    bad = {name: value for name, value in BAD.items() if name != 'FLA_ALLOW_BACKENDS'}
    done = python(USE, **bad)
    assert done.stdout.split() == ['a']
    for name in ('FLA_DISABLE_BACKEND_DISPATCH', 'FLA_STRICT', 'FLA_LOG_LEVEL', 'FLA_PER_OP', 'FLA_NO_SUCH_VARIABLE'):
        assert name in done.stderr, name


def test_more_malformed_variables():
    """Other nonsense of the same kinds, among it an allow list that allows nothing: the import works, the call says no."""
    variables = dict.fromkeys(BAD, '\udcff\x01 ')
    variables |= {'FLA_ALLOW_BACKENDS': ',', 'FLA_LOG_LEVEL': '-7', 'FLA_PER_OP': '='}
    done = python(
        USE.replace('print(f())', '')
        + """
from fla.backends import NoBackendError
try:
    print(f())
except NoBackendError as error:
    print('none')
""",
        **variables,
    )
    assert done.stdout.split() == ['none']


def test_operations_and_layers_run_without_triton():
    done = python(
        """
        import sys

        class Blocker:
            def find_spec(self, name, path=None, target=None):
                if name.split('.')[0] in ('triton', 'tilelang'):
                    raise ModuleNotFoundError(f'No module named {name!r} (blocked)', name=name)

        sys.meta_path.insert(0, Blocker())
        import torch
        from fla.layers import Attention, GatedDeltaNet, KimiDeltaAttention
        from fla.backends import trace
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
        from fla.ops.kda import chunk_kda, fused_recurrent_kda

        x = torch.randn(1, 2, 1, 4, requires_grad=True)
        with trace() as recorded:
            for kda in (chunk_kda, fused_recurrent_kda):
                kda(x, x, x, -x.abs(), x[..., 0])[0].sum().backward()
            for rule in (chunk_gated_delta_rule, fused_recurrent_gated_delta_rule):
                rule(x, x, x, g=-x[..., 0].abs(), beta=x[..., 0])[0].sum().backward()
            for layer in (GatedDeltaNet, KimiDeltaAttention, Attention):
                layer(hidden_size=16, num_heads=2, **{} if layer is Attention else {'head_dim': 8})(torch.randn(1, 5, 16))
        assert 'triton' not in sys.modules
        print(sorted({one.function for one in recorded}), {one.backend for one in recorded} - {'sdpa'})
        """
    )
    functions, backends = done.stdout.strip().rsplit(' {', 1)
    assert backends == "'reference'}"
    for name in (
        'chunk_kda',
        'fused_recurrent_kda',
        'chunk_gated_delta_rule',
        'fused_recurrent_gated_delta_rule',
        'parallel_attn',
    ):
        assert name in functions


def test_without_dispatch_functions_on_a_cpu_say_that_they_need_a_gpu_and_not_triton():
    python(
        """
        import sys

        sys.modules['triton'] = None
        import torch
        from fla.modules.activations import silu_and_mul, swiglu, swiglu_linear
        from fla.modules.convolution import causal_conv1d, causal_conv1d_update
        from fla.modules.fused_cross_entropy import cross_entropy_loss
        from fla.modules.fused_linear_cross_entropy import fused_linear_cross_entropy_loss
        from fla.modules.fused_norm_gate import rms_norm_gated
        from fla.modules.l2norm import l2norm
        from fla.modules.layernorm import rms_norm
        from fla.modules.rotary import rotary_embedding
        from fla.ops.attn import parallel_attn
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
        from fla.ops.kda import chunk_kda, fused_recurrent_kda

        x, y, target = torch.randn(1, 2, 1, 4), torch.randn(2, 4), torch.tensor([0, 1])
        calls = [
            lambda: chunk_kda(x, x, x, -x.abs(), x[..., 0]),
            lambda: fused_recurrent_kda(x, x, x, -x.abs(), x[..., 0]),
            lambda: chunk_gated_delta_rule(x, x, x, -x[..., 0].abs(), x[..., 0]),
            lambda: fused_recurrent_gated_delta_rule(x, x, x, -x[..., 0].abs(), beta=x[..., 0]),
            lambda: parallel_attn(x, x, x),
            lambda: rms_norm(y, None),
            lambda: rms_norm_gated(y, y, None),
            lambda: l2norm(y),
            lambda: swiglu(y, y),
            lambda: silu_and_mul(y),
            lambda: swiglu_linear(y, y, y, None),
            lambda: rotary_embedding(x, y[:, :2], y[:, :2]),
            lambda: causal_conv1d(y[None], y.t()),
            lambda: causal_conv1d_update(y[None], y.t()[None], None, y.t()),
            lambda: cross_entropy_loss(y, target),
            lambda: fused_linear_cross_entropy_loss(y, target, y),
        ]
        for i, call in enumerate(calls):
            try:
                call()
            except RuntimeError as error:
                assert 'is written in Triton and needs a GPU' in str(error), (i, error)
            else:
                raise AssertionError(i)
        """,
        FLA_DISABLE_BACKEND_DISPATCH='1',
    )


def test_everything_works_without_triton_and_optional_packages():
    python(
        """
        import sys

        class Blocker:
            names = ('triton', 'tilelang', 'numpy', 'ruamel', 'pydantic', 'rich', 'watchfiles', 'flash_kda', 'flash_qla')

            def find_spec(self, name, path=None, target=None):
                if name.split('.')[0] in self.names:
                    raise ModuleNotFoundError(f'No module named {name!r} (blocked)', name=name)

        sys.meta_path.insert(0, Blocker())
        import torch
        import fla
        import fla.backends
        from fla.backends import BackendRegistry, BaseBackend, NoBackendError, dispatch, explain, validate
        from fla.backends import runs_on_triton

        @dispatch('op_without_triton', default_verifier=runs_on_triton)
        def f(q: torch.Tensor):
            import triton
            return triton

        registry = BackendRegistry('op_without_triton')
        q = torch.zeros(2)
        try:
            f(q)
        except NoBackendError as error:
            assert "package 'triton' is not installed" in str(error), error
        else:
            raise AssertionError

        class Needy(BaseBackend):
            backend_type = 'needy'
            package_name = 'tilelang'

            def f(self, q):
                return 'needy'

        class Plain(BaseBackend):
            backend_type = 'plain'
            kind = 'reference'

            def f(self, q):
                return 'plain'

        registry.register(Needy())
        registry.register(Plain())
        assert f(q) == 'plain'
        assert "package 'tilelang' is not installed" in explain(f, q)['needy'].reason
        validate()
        """
    )


def test_planning_a_cpu_call_asks_no_driver():
    """cuInit in a parent makes CUDA unusable in its forks, and `torch.cuda.is_available()` runs it."""
    python(
        """
        import torch

        def driver(*_, **__):
            raise AssertionError('asked for a device')

        for name in ('_cuda_getDeviceCount', '_cuda_init', '_xpu_getDeviceCount', '_accelerator_getAccelerator'):
            if hasattr(torch._C, name):
                setattr(torch._C, name, driver)
        for name, value in list(vars(torch.cuda).items()):
            if callable(value) and not isinstance(value, type) and name not in ('is_initialized', '_is_in_bad_fork'):
                setattr(torch.cuda, name, driver)

        from fla.backends import BackendRegistry, BaseBackend, describe, dispatch, explain, runs_on_triton, trace
        from fla.backends import refresh, use_backend, validate, manifest
        from fla.backends.observe import snapshot

        class Fussy(BaseBackend):
            backend_type = 'fussy'
            devices = ('cuda', 'rocm', 'xpu', 'npu')
            min_capability = (9, 0)

            def probe(self, device):
                raise AssertionError('probed for a CPU call')

            def f(self, q):
                return self.backend_type

        class Everywhere(Fussy):
            backend_type = 'everywhere'
            devices = ('cpu', 'cuda')

            def probe(self, device):
                assert device.platform == 'cpu', device
                return True

        class Plain(BaseBackend):
            backend_type = 'reference'
            kind = 'reference'

            def f(self, q):
                return 'reference'

        registry = BackendRegistry('op_on_cpu')
        handles = [registry.register(Fussy()), registry.register(Everywhere()), registry.register(Plain())]

        @dispatch('op_on_cpu', default_verifier=runs_on_triton)
        def f(q: torch.Tensor):
            return 'default'

        q = torch.zeros(2)
        assert f(q) == 'everywhere'
        with use_backend('reference', op='op_on_cpu'), trace():
            assert f(q) == 'reference'
        assert explain(f, q).winner == 'everywhere'
        assert f.resolve(q)(q) == 'everywhere'
        handles[1].remove()
        assert f(q) == 'reference'
        refresh()
        assert f(q) == 'reference'
        validate(), describe('op_on_cpu'), snapshot(), manifest(), list(f.backends)
        assert not torch.cuda.is_initialized()
        """
    )


@pytest.mark.parametrize('value', ['1', 'true', ' YES '])
def test_baseline_mode_dispatches_nothing(value):
    python(
        """
        from fla.backends import BackendRegistry, BaseBackend, dispatch

        class A(BaseBackend):
            backend_type = 'a'
            def f(self, x=None):
                return 'a'

        BackendRegistry('op_baseline').register(A())

        def plain(x=None):
            return 'default'

        plain.__name__ = 'f'
        f = dispatch('op_baseline')(plain)
        assert f is plain
        assert f() == 'default'
        assert list(f.backends) == ['a', 'default']
        assert f.bind('a')() == 'default'
        assert f.resolve()() == 'default'
        """,
        FLA_DISABLE_BACKEND_DISPATCH=value,
    )


EVERY_MODULE = """
import importlib, os, pkgutil, sys

def modules(package):
    for found in pkgutil.iter_modules(package.__path__, f'{package.__name__}.'):
        if not found.name.endswith('.__main__'):
            yield found.name
            if found.ispkg and found.name in sys.modules:
                yield from modules(sys.modules[found.name])
"""


@pytest.mark.slow
def test_importing_every_module_changes_nothing_elsewhere():
    """Neither PyTorch nor the environment nor the root logger, and no device is asked for."""
    cold_python(
        EVERY_MODULE
        + """
import logging
import torch

def driver(*_):
    raise AssertionError('asked for a device')

for name in ('_cuda_getDeviceCount', '_cuda_init', '_xpu_getDeviceCount', '_accelerator_getAccelerator'):
    if hasattr(torch._C, name):
        setattr(torch._C, name, driver)

import torch._dynamo
try:
    import triton
except ImportError:
    pass
watched = torch, torch.Tensor, torch.autograd, torch.compiler, torch.cuda, torch.nn, torch.nn.Module, logging.root
before = [dict(vars(thing)) for thing in watched]
environment = dict(os.environ)

import fla
count = 0
for name in modules(fla):
    try:
        importlib.import_module(name)
        count += 1
    except ModuleNotFoundError as error:
        assert error.name.split('.')[0] != 'fla', error
assert count > 20, count
for thing, names in zip(watched, before):
    changed = [name for name, value in names.items() if vars(thing).get(name) is not value]
    assert not changed, (thing, changed)
assert dict(os.environ) == environment
assert not torch.cuda.is_initialized()
"""
    )


@pytest.mark.slow
def test_operations_and_their_oracles_need_no_triton():
    """It is needed by the modules around the kernels, which are imported when a kernel is to run."""
    cold_python(
        EVERY_MODULE
        + """
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ('triton', 'tilelang'):
            raise ModuleNotFoundError(f'No module named {name!r} (blocked)', name=name)

sys.meta_path.insert(0, Blocker())
import fla
failed = []
for name in modules(fla):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        assert error.name.split('.')[0] in ('triton', 'tilelang'), error
        failed.append(name)
packages = {found.name for found in pkgutil.walk_packages(fla.__path__, 'fla.') if found.ispkg}
plain = [name for name in failed if name in packages or name.endswith(('.naive', '.reference', '.checks'))]
assert not [name for name in plain if '.kernels' not in name], plain
"""
    )


def test_handlers_belong_to_the_application():
    """Warnings are seen until the application configures logging, and from then on once and only by its handlers."""
    done = python(
        """
        import io
        import logging

        kind = logging.getLoggerClass()
        import fla.backends
        from fla.backends.core import logs

        assert logging.root.handlers == []
        assert logging.root.level == logging.WARNING
        assert logging.getLoggerClass() is kind
        assert logs.logger.propagate
        assert logs.logger.level == logging.NOTSET
        assert all(isinstance(handler, logging.NullHandler) for handler in logs.logger.handlers)
        logs.logger.info('quiet')
        logs.logger.warning('first')
        stream = io.StringIO()
        logging.basicConfig(stream=stream, format='%(message)s')
        logs.logger.warning('second')
        assert stream.getvalue().split() == ['second']
        """
    )
    assert done.stderr.count('first') == 1
    assert 'second' not in done.stderr
    assert 'quiet' not in done.stderr
