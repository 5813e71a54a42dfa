"""Vendors' packages that are installed but unusable: dispatch chooses another backend and gives the reason. Packages with
their toggle off are not imported."""

import logging
import os
import sys
import types
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fla.backends import default_dispatcher, explain
from fla.modules.backends.causal_conv1d import CausalConv1dBackend
from fla.modules.backends.flag_gems import FlagGemsBackend
from fla.modules.backends.flashinfer import FlashInferBackend as FlashInferModules
from fla.modules.backends.liger import LigerBackend
from fla.modules.convolution import causal_conv1d
from fla.modules.layernorm import rms_norm
from fla.ops.attn import parallel_attn
from fla.ops.attn.backends.flash_attn import FlashAttention2Backend, FlashAttention3Backend
from fla.ops.attn.backends.flashinfer import FlashInferBackend
from fla.ops.attn.backends.varlen import TorchVarlenBackend
from fla.ops.attn.backends.xformers import XFormersBackend
from fla.ops.launch import vendor
from tests.ops.vendors import BF16, H100, fakes, metadata, pretend
from tests.vendor_signatures import SIGNATURES

ROWS = (rms_norm, {'x': torch.ones(3, 16, dtype=BF16), 'weight': torch.ones(16, dtype=BF16)})
STEPS = (causal_conv1d, {'x': torch.ones(1, 6, 8, dtype=BF16), 'weight': torch.ones(8, 4, dtype=BF16)})
HEADS = (parallel_attn, {**dict.fromkeys('qkv', torch.ones(1, 6, 2, 64, dtype=BF16)), 'window_size': 3})

# backend, distribution, version, a call that the backend serves
VENDORS = {
    'liger': (LigerBackend, 'liger-kernel', '0.8.5', ROWS),
    'flashinfer': (FlashInferModules, 'flashinfer-python', '0.7.4', ROWS),
    'flag_gems': (FlagGemsBackend, 'flag-gems', '5.0.2', ROWS),
    'causal_conv1d': (CausalConv1dBackend, 'causal-conv1d', '1.5.0', STEPS),
    'flash_attn': (FlashAttention2Backend, 'flash-attn', '2.8.3', HEADS),
    'flash_attn_3': (FlashAttention3Backend, 'flash-attn-3', '3.0.0', HEADS),
    'flashinfer of attention': (FlashInferBackend, 'flashinfer-python', '0.7.4', HEADS),
    'xformers': (XFormersBackend, 'xformers', '0.0.35', HEADS),
}
LOUD = """
import logging, warnings
logging.getLogger(__name__).warning('cannot load my extensions')
warnings.warn('no GPU')
"""
NO_OPERATOR = "def {}(*args, **more):\n    raise NotImplementedError('No operator found')\n"


@pytest.fixture
def package(monkeypatch, tmp_path):
    """Writes a package with everything a backend needs, and enables the backend, on a pretended H100."""
    for name in [n for n in os.environ if n.startswith('FLA_')]:
        monkeypatch.delenv(name)
    default_dispatcher().reset()
    written, before = set(), {}

    def make(name, start='', function=NO_OPERATOR, lacking=None):
        backend, distribution, version, _ = VENDORS[name]
        root = backend.package_name
        before.update({n: sys.modules.pop(n) for n in list(sys.modules) if n.partition('.')[0] == root})
        written.add(root)
        contents = {root: f'{start}\n'}
        for path in backend.needs:
            module, _, attribute = path.partition(':')
            parts = module.split('.')
            for depth in range(1, len(parts) + 1):
                contents.setdefault('.'.join(parts[:depth]), '')
            contents[module] += '' if path == lacking else function.format(attribute)
        for module, text in contents.items():
            folder = tmp_path.joinpath(*module.split('.'))
            folder.mkdir(parents=True)
            (folder / '__init__.py').write_text(text)
        metadata(monkeypatch, tmp_path, root, distribution, version)
        monkeypatch.setenv(backend.env_var, '1')
        pretend(monkeypatch, H100)
        monkeypatch.setattr(vendor, '_place', lambda device: torch.device('cpu'))

    yield make
    for name in [n for n in sys.modules if n.partition('.')[0] in written]:
        del sys.modules[name]
    sys.modules.update(before)
    default_dispatcher().reset()


def decided(name):
    """Returns a backend's candidate for a call that it would serve but another backend serves."""
    backend, _, _, (function, arguments) = VENDORS[name]
    with torch.no_grad():
        decision = explain(function, **fakes(arguments))
    assert decision.winner not in (None, backend.backend_type)
    return decision[backend.backend_type]


ABI = "raise ImportError('undefined symbol: _ZN3c104cuda14ExchangeDeviceEa')"
BROKEN = {
    'built for another PyTorch': ({'start': ABI}, 'ImportError: undefined symbol: _ZN3c104cuda14ExchangeDeviceEa'),
    'a dependency is missing': ({'start': 'import not_there'}, "ModuleNotFoundError: No module named 'not_there'"),
    'no operator': ({'start': LOUD}, 'NotImplementedError: No operator found'),
}


@pytest.mark.parametrize('case', BROKEN)
@pytest.mark.parametrize('name', VENDORS)
def test_broken_package_is_unavailable(package, caplog, recwarn, name, case):
    how, why = BROKEN[case]
    package(name, **how)
    found = decided(name)
    assert (found.verdict, found.reason) == ('unavailable', f'probe() raised {why}')
    # the reason has the package's error; its warnings are suppressed, as another backend serves
    assert not [record for record in caplog.records if 'extensions' in record.getMessage()]
    assert not [one for one in recwarn if 'no GPU' in str(one.message)]


@pytest.mark.parametrize('path', [path for _, (backend, *_) in VENDORS.items() for path in backend.needs])
def test_package_without_a_needed_name_is_unavailable(package, path):
    name = next(name for name, (backend, *_) in VENDORS.items() if path in backend.needs)
    package(name, lacking=path)
    module, _, attribute = path.partition(':')
    assert decided(name).reason == f'probe() raised ImportError: cannot import name {attribute!r} from {module!r}'


@pytest.mark.parametrize('name', VENDORS)
def test_package_with_toggle_off_is_not_imported(package, monkeypatch, name):
    package(name, start=ABI)
    monkeypatch.delenv(VENDORS[name][0].env_var)
    assert decided(name).verdict == 'disabled'
    assert VENDORS[name][0].package_name not in sys.modules


@pytest.mark.parametrize('name', VENDORS)
def test_package_is_not_probed_inside_a_graph_capture(package, monkeypatch, name):
    package(name)
    pretend(monkeypatch, H100, capturing=True)
    assert decided(name).reason == (
        'asked for inside a CUDA graph capture, where it cannot be tried: call it once before, then refresh()'
    )
    assert VENDORS[name][0].package_name not in sys.modules


def test_usable_package_may_log_and_warn(package, caplog, recwarn):
    """The probe of a usable package passes its messages on, and runs once."""
    package('flash_attn', LOUD, 'def {}(q, k, v, *args, **more):\n    return v\n')
    function, arguments = HEADS
    for _ in range(2):
        with torch.no_grad():
            assert explain(function, **fakes(arguments)).winner == 'flash_attn'
    assert [record.getMessage() for record in caplog.records if record.name == 'flash_attn'] == ['cannot load my extensions']
    assert [str(one.message) for one in recwarn if one.category is UserWarning] == ['no GPU']
    assert logging.getLogger('flash_attn').propagate
    assert not logging.getLogger('flash_attn').handlers


def test_concurrent_probes_restore_the_logger():
    """The first probe to begin is the first to end."""
    logger = logging.getLogger('json')
    first, second = (vendor._imported(('json:loads',)) for _ in range(2))
    first.__enter__()
    second.__enter__()
    assert not logger.propagate
    first.__exit__(None, None, None)
    assert not logger.propagate
    second.__exit__(None, None, None)
    assert logger.propagate
    assert not logger.handlers


def test_tensors_made_on_import_are_ordinary(package):
    """The modes of the call that triggers the import do not apply to it."""
    package('flash_attn', 'import torch\nTABLE = torch.ones(1)', 'def {}(q, k, v, *args, **more):\n    return v\n')
    function, arguments = HEADS
    arguments = fakes(arguments)
    with torch.inference_mode(), FakeTensorMode(allow_non_fake_inputs=True):
        assert explain(function, **arguments).winner == 'flash_attn'
    table = sys.modules['flash_attn'].TABLE
    assert type(table) is torch.Tensor
    assert not table.is_inference()


def test_package_with_wrong_results_is_unavailable(package):
    package('flash_attn', '', 'def {}(q, k, v, *args, **more):\n    return v * 7\n')
    assert decided('flash_attn').reason == 'its smallest call is off by 6.0 where 1.0 is right'


def test_pytorch_built_without_flash_attention(monkeypatch):
    """Such a PyTorch has the function, which raises."""

    def varlen_attn(*args, **more):
        raise RuntimeError('USE_FLASH_ATTENTION was not enabled for build')

    module = types.ModuleType('torch.nn.attention.varlen')
    module.varlen_attn = varlen_attn
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(TorchVarlenBackend, 'is_available', classmethod(lambda cls: (True, None)))
    monkeypatch.setattr(vendor, '_place', lambda device: torch.device('cpu'))
    monkeypatch.setenv('FLA_TORCH_VARLEN', '1')
    pretend(monkeypatch, H100)
    default_dispatcher().reset()
    found = explain(parallel_attn, **fakes(HEADS[1]))['torch_varlen']
    default_dispatcher().reset()
    assert found.reason == 'probe() raised RuntimeError: USE_FLASH_ATTENTION was not enabled for build'


def test_each_needed_function_has_a_recorded_signature():
    needs = {path.replace(':', '.') for backend, *_ in VENDORS.values() for path in backend.needs}
    needs |= {path.replace(':', '.') for path in TorchVarlenBackend.needs}
    masks = {f'xformers.ops.fmha.attn_bias.{name}' for name in ('LowerTriangularMask', 'LowerTriangularFromBottomRightMask')}
    assert needs - masks == {path for path in SIGNATURES if not path.endswith('.make_local_attention')}


def test_probe_restores_warning_filters(package):
    before = list(warnings.filters)
    package('liger')
    decided('liger')
    assert warnings.filters == before
