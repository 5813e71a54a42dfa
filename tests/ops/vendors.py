"""Stand-ins for vendors' packages, and GPUs that are not here."""

import inspect
import sys
import types

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fla.backends import default_dispatcher, explain, trace
from fla.utils.devices import Device
from tests.vendor_signatures import SIGNATURES

H100 = Device('cuda', 0, 'NVIDIA H100', (9, 0))
B200 = Device('cuda', 0, 'NVIDIA B200', (10, 0))
A100 = Device('cuda', 0, 'NVIDIA A100', (8, 0))
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def takes(path):
    """A stand-in's function has the parameters that are assumed of the vendor's, after `*` those that go by name alone."""

    def decorate(function):
        parameters = inspect.signature(function).parameters.values()
        names = [one.name for one in parameters]
        by_name = [one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY]
        if by_name:
            names.insert(names.index(by_name[0]), '*')
        assert tuple(names) == SIGNATURES[path]
        return function

    return decorate


def install(monkeypatch, folder, module, distribution, version, **functions):
    """A module, and the metadata of the distribution that it comes from."""
    stub = types.ModuleType(module)
    vars(stub).update(functions)
    monkeypatch.setitem(sys.modules, module, stub)
    metadata(monkeypatch, folder, module, distribution, version)
    return stub


def metadata(monkeypatch, folder, module, distribution, version):
    """The metadata of a distribution, in a folder from which modules are then imported, too."""
    info = folder / f'{distribution.replace("-", "_")}-{version}.dist-info'
    info.mkdir()
    (info / 'METADATA').write_text(f'Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n')
    (info / 'top_level.txt').write_text(f'{module}\n')
    monkeypatch.syspath_prepend(str(folder))


def trust(monkeypatch, *backends):
    """The packages of these backends work: nothing is tried."""
    for backend in backends:
        monkeypatch.setattr(backend, 'probe', lambda self, device: (True, None))


def odd(x):
    """The same numbers and strides at an address that is no multiple of 16."""
    size = 2 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    found = x.new_empty(size).as_strided(x.shape, x.stride(), 1).copy_(x)
    assert found.data_ptr() % 16
    return found


def on_16(*tensors):
    """Whether 16 bytes at a time can be read from each."""
    return all(x.data_ptr() % 16 == 0 for x in tensors)


def pretend(monkeypatch, *devices, capturing=False):
    """The dispatcher sees these devices, and a probe runs there inside a CUDA graph capture or not."""
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: capturing)
    monkeypatch.setattr(
        default_dispatcher(), 'device_facts', lambda platform: tuple(d for d in devices if d.platform == platform)
    )


def fakes(arguments):
    """The arguments with every tensor on a GPU, without data."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        made = {}
        for name, value in arguments.items():
            if isinstance(value, torch.Tensor) and not name.endswith('_cpu'):
                value = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device='cuda')
            elif isinstance(value, torch.Tensor):
                value = mode.from_tensor(value)
            made[name] = value
    return made


def ran(function, op, arguments):
    """Which backend serves a call, and what it returns; `explain` must say the same."""
    said = explain(function, **arguments).winner
    with trace() as recorded:
        result = function(**arguments)
    assert recorded.last_backend(f'{op}.{function.__name__}') == said
    return said, result
