"""Rules for backends outside their verifiers: arguments of methods, device checks, deprecated Triton functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from fla.backends.backend.base import BaseBackend
from fla.backends.lint.findings import Finding
from fla.backends.lint.source import VERIFIER_SUFFIXES, Project, Source, parameters

# A call to torch → what to use instead.
_HELPERS = {
    'torch.cuda.is_available': '`devices` on the class, or fla.utils.is_nvidia() (is_amd() for ROCm)',
    'torch.cuda.device_count': 'fla.utils.devices.devices_of(platform)',
    'torch.cuda.get_device_capability': '`min_capability` on the class, or fla.utils.capability_of(device)',
    'torch.cuda.get_device_name': 'the `name` of the Device that probe() gets, or of fla.utils.devices.devices_of(platform)',
    'torch.cuda.get_device_properties': 'fla.utils.check_shared_mem(arch) for shared memory',
    'torch.version.hip': 'fla.utils.devices.is_rocm_build()',
    'torch.version.cuda': 'fla.utils.devices.is_rocm_build()',
    'torch.xpu.is_available': '`devices` on the class, or fla.utils.is_intel()',
    'torch.npu.is_available': '`devices` on the class, or fla.utils.is_npu()',
}


def check(project: Project) -> Iterator[Finding]:
    """Yields every finding of these rules."""
    for source in project.sources.values():
        yield from _block_pointers(source)
        backends = [cls for cls in source.classes() if project.is_backend(source, cls)]
        if backends or 'backends' in (*source.module.split('.'), source.file.parent.name):
            yield from _device_checks(source)
        for cls in backends:
            yield from _arguments(project, source, cls)


def _block_pointers(source: Source) -> Iterator[Finding]:
    for node in ast.walk(source.tree):
        named = isinstance(node, ast.Attribute) and node.attr == 'make_block_ptr'
        if isinstance(node, ast.ImportFrom):
            named = any(name.name == 'make_block_ptr' for name in node.names)
        if named:
            remedy = 'use pointers with masks, or tensor descriptors'
            yield source.finding('block-pointer', node, 'make_block_ptr fails on Triton 3.9', remedy)


def _device_checks(source: Source) -> Iterator[Finding]:
    verifiers = [n for n in ast.walk(source.tree) if isinstance(n, ast.FunctionDef) and n.name.endswith(VERIFIER_SUFFIXES)]
    in_verifiers = {inner for verifier in verifiers for inner in ast.walk(verifier)}
    for node in ast.walk(source.tree):
        if isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Load) and node not in in_verifiers:
            name = source.dotted(node)
            if name in _HELPERS:
                problem = f'asks {name}, whose answer misleads on ROCm, Triton-only and CPU machines'
                yield source.finding('direct-device-check', node, problem, f'use {_HELPERS[name]}')


def _arguments(project: Project, source: Source, cls: ast.ClassDef) -> Iterator[Finding]:
    inherited = project.methods(source, cls)
    sees_all_verifiers = _sees_all_verifiers(project, source, cls)
    for method in cls.body:
        if not isinstance(method, ast.FunctionDef) or not _is_implementation(method):
            continue
        verifiers = [inherited[method.name + suffix][1] for suffix in VERIFIER_SUFFIXES if method.name + suffix in inherited]
        used = _used(method)
        read = used.union(*map(_used, verifiers))
        static = any(isinstance(d, ast.Name) and d.id == 'staticmethod' for d in method.decorator_list)
        for parameter in parameters(method)[0 if static else 1 :]:
            if parameter.arg not in read and sees_all_verifiers:
                problem = f'{cls.name}.{method.name} ignores {parameter.arg!r}, and so does its verifier'
                remedy = 'use it, refuse unsupported values in the verifier, or leave it out of the signature'
                yield source.finding('ignored-argument', parameter, problem, remedy)
        for rest, stars in ((method.args.vararg, '*'), (method.args.kwarg, '**')):
            if rest is not None and rest.arg not in used:
                problem = f'{cls.name}.{method.name} takes {stars}{rest.arg} and drops it'
                remedy = 'leave it out: calls that set what the method does not name are then refused with a reason'
                yield source.finding('swallowed-arguments', rest, problem, remedy)


def _is_implementation(method: ast.FunctionDef) -> bool:
    """Returns whether a method implements a function: not part of BaseBackend, no verifier, property or stub."""
    if method.name.startswith('_') or method.name.endswith(VERIFIER_SUFFIXES) or hasattr(BaseBackend, method.name):
        return False
    names = {d.attr if isinstance(d, ast.Attribute) else getattr(d, 'id', '') for d in method.decorator_list}
    if names & {'property', 'cached_property', 'classmethod', 'abstractmethod', 'setter'}:
        return False
    return not all(isinstance(s, (ast.Pass, ast.Raise)) or _is_literal(s) for s in method.body)


def _is_literal(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _used(function: ast.FunctionDef) -> set[str]:
    """Returns the names that a function reads, and its string constants, which may be keys; every parameter if it calls
    `locals()`."""
    used: set[str] = set()
    for statement in function.body:
        for node in ast.walk(statement):
            match node:
                case ast.Name(id=name, ctx=ast.Load()) | ast.Constant(value=str(name)):
                    used.add(name)
    return used | {parameter.arg for parameter in parameters(function)} if 'locals' in used else used


def _sees_all_verifiers(project: Project, source: Source, cls: ast.ClassDef) -> bool:
    """Returns whether every base is in the project, so that none can hide a verifier."""
    for where, node in project.ancestry(source, cls):
        for base in node.bases:
            found = isinstance(base, ast.Name) and project.resolve(where, base.id) is not None
            if not found and where.dotted(base).rpartition('.')[2] not in ('BaseBackend', 'object', 'ABC', 'Protocol'):
                return False
    return True
