"""What a backend is.

A backend is a class that says what it is (attributes), when it can run (`is_available`, `is_enabled`, `<fn>_verifier`,
`<fn>_prefers`) and how (`<fn>`). It implements only the functions it has. Every fact declared here is enforced by the
framework: `fla.backends.plan.plan` turns it into a test with a reason, and `explain` shows the same test.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import sys
import threading
from abc import ABCMeta
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch

from fla.utils.devices import Device
from fla.utils.env import parse_boolean

# A reason is constant text, or a template with the values it needs, formatted only when somebody reads it: formatting a
# symbolic size inside a compiled verifier would specialise that size.
Reason = str | tuple[Any, ...] | None
Verdict = tuple[bool, Reason]

KINDS = ('vendor', 'native', 'default', 'reference')
RESERVED_NAMES = ('default', 'triton', 'reference')

DEFAULT_PRIORITY = 5
DEFAULT_IMPLEMENTATION_PRIORITY = 100
REFERENCE_PRIORITY = 1000


def format_reason(reason: Reason) -> str:
    """A verifier's reason as text."""
    if reason is None:
        return 'no reason given'
    if isinstance(reason, tuple):
        if not reason:
            return 'no reason given'
        template, *values = reason
        try:
            return str(template) % tuple(values)
        except Exception:  # a backend's own text must not be what a user's call dies of
            return ' '.join([str(template), *map(_shown, values)])
    return str(reason)


def _shown(value: Any) -> str:
    try:
        return str(value)
    except Exception:  # a value that cannot say what it is must not end the call either
        return f'<{type(value).__name__}>'


_MISSING = object()

ChangeListener = Callable[[Any, str], None]

# Told of every attribute that changes on a backend class or instance, before (when it may raise) and after.
_before_change: list[ChangeListener] = []
_after_change: list[ChangeListener] = []


def on_change(before: ChangeListener, after: ChangeListener) -> None:
    """Call `before(owner, name)` and `after(owner, name)` around every setting and deleting of an attribute of a backend
    class or instance; an exception in `before` prevents it."""
    _before_change.append(before)
    _after_change.append(after)


def _tell(listeners: list[ChangeListener], owner: Any, name: str) -> None:
    if not name.startswith(('_abc_', '__')):
        for listener in listeners:
            listener(owner, name)


# Threads that are between a change and what hears of it. A fork leaves the child with the change and without the hearing.
_under_way: dict[int, Any] = {}


@contextlib.contextmanager
def _changing(owner: Any, name: str) -> Iterator[None]:
    _tell(_before_change, owner, name)
    if torch.compiler.is_dynamo_compiling():  # a backend that notes something for itself; no thread can be asked for here
        yield
        _tell(_after_change, owner, name)
        return
    me = threading.get_ident()
    outer = _under_way.get(me)
    _under_way[me] = owner
    try:
        yield
        _tell(_after_change, owner, name)
    finally:
        if outer is None:
            _under_way.pop(me, None)


def changes_of_other_threads() -> bool:
    """Whether another thread is changing a backend; in a forked child: was, and will never say so."""
    me = threading.get_ident()
    return any(thread != me for thread in list(_under_way))


def _is_already(attributes: Mapping[str, Any], name: str, value: Any) -> bool:
    """Whether setting an attribute changes nothing."""
    known = attributes.get(name, _MISSING)
    return known is value or (type(known) is type(value) and isinstance(value, (bool, int, float, str)) and known == value)


class BackendMeta(ABCMeta):
    """Tells dispatch of changed attributes, so that `monkeypatch.setattr(MyBackend, 'priority', 1)` is seen by the next
    call, compiled callers included. Derives from ABCMeta so that backends may mix in ABCs."""

    def __setattr__(cls, name: str, value: Any) -> None:
        if _is_already(vars(cls), name, value):
            return
        with _changing(cls, name):
            super().__setattr__(name, value)

    def __delattr__(cls, name: str) -> None:
        with _changing(cls, name):
            super().__delattr__(name)


class BaseBackend(metaclass=BackendMeta):
    """Base class of backends.

    For a dispatched function `f` a backend may define
        `f(self, ...)`: the implementation. It names the parameters it honours; a call that sets another one to something
            else than its default is refused by the framework (`**kwargs` does not count as honouring).
        `f_verifier(self, ...)`: names only the parameters it reads and returns `(True, None)` or `(False, reason)`.
        `f_prefers(self, ...)`: the same form; False demotes the backend behind the other eligible ones.

    Attributes:
        backend_type: the backend's name, unique within an operation.
        package_name: module that must be importable, None for none.
        package_version: version specifier ('>=1.2') of the distribution, or a requirement ('some-dist>=1.2') where
            the distribution is not named like the module.
        env_var: name of the toggle, None for none. A set toggle wins over `default_enable`.
        default_enable: bool, or a callable without arguments evaluated when a plan is built.
        priority: lower is asked earlier.
        kind: 'vendor' (somebody's package), 'native' (this project's own) or 'reference' (plain PyTorch).
        vendor: who makes it, for policy tokens `vendor:NAME`.
        devices: platforms ('cpu', 'cuda', 'rocm', 'xpu', 'npu', 'mps', 'meta') the first tensor argument may be on, or a
            mapping from parameter names to platforms. None for any. 'cuda' never includes ROCm.
        dtypes: dtypes of the first tensor argument, or a mapping from parameter names to dtypes. None for any.
        min_capability: lowest compute capability, such as (9, 0); compared on `cuda` only.
        grad: 'backward' if it is differentiable, 'none' if it is for inference only.
        tolerance: bound of the relative RMS error per dtype, read by tests.
        extra_env: environment variables that an overridden `is_enabled()` reads.
        traceable: False if its verifiers cannot be traced by torch.compile: it is then skipped in compiled code.
        retryable: exception types after which another backend may be tried.
        verified: whether it has met its real package.
    """

    backend_type: ClassVar[str] = 'base'
    package_name: ClassVar[str | None] = None
    package_version: ClassVar[str | None] = None
    env_var: ClassVar[str | None] = None
    default_enable: ClassVar[bool | Callable[[], bool]] = True
    priority: ClassVar[int] = DEFAULT_PRIORITY
    kind: ClassVar[str] = 'vendor'
    vendor: ClassVar[str | None] = None
    devices: ClassVar[Sequence[str] | Mapping[str, Sequence[str]] | None] = None
    dtypes: ClassVar[Sequence[torch.dtype] | Mapping[str, Sequence[torch.dtype]] | None] = None
    min_capability: ClassVar[tuple[int, int] | None] = None
    grad: ClassVar[str] = 'backward'
    tolerance: ClassVar[Mapping[torch.dtype, float]] = {}
    extra_env: ClassVar[Sequence[str]] = ()
    traceable: ClassVar[bool] = True
    retryable: ClassVar[tuple[type[BaseException], ...]] = ()
    verified: ClassVar[bool] = True

    def __setattr__(self, name: str, value: Any) -> None:
        if _is_already(vars(self), name, value):
            return
        with _changing(self, name):
            object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        with _changing(self, name):
            object.__delattr__(self, name)

    def __repr__(self) -> str:
        return f'<{type(self).__name__} {self.impl_id}>'

    @property
    def impl_id(self) -> str:
        """`kind.backend_type`, the name that policy tokens `impl:…` use."""
        return f'{self.kind}.{self.backend_type}'

    @classmethod
    def is_available(cls) -> bool | Verdict:
        """Whether the backend can be used at all on this machine, whatever the call: package, version, toolchain.

        Evaluated when a plan is built and cached until `refresh()`. It must not touch an accelerator: what needs one
        belongs into `probe`. Overrides may return a bool, or `(False, reason)`; an exception is a reason, too.
        """
        return check_package(cls.package_name, cls.package_version)

    def probe(self, device: Device) -> bool | Verdict:
        """Whether the backend works on one device, asked before the first call there and cached per kind of device.

        Where a package is known to import and then fail, run its smallest real call here. An exception is a reason.
        """
        return True

    @classmethod
    def is_enabled(cls) -> bool:
        """Whether the toggle allows the backend. An override names in `extra_env` the variables it reads."""
        return toggle_state(cls.env_var, cls.default_enable)

    @classmethod
    def can_use(cls) -> bool:
        """Available and enabled, now. A convenience: dispatch itself keeps the two apart."""
        return verdict_of(cls.is_available())[0] and bool(cls.is_enabled())

    def explain_notes(self, function: str, arguments: Mapping[str, Any]) -> Sequence[str]:
        """What `explain` says beside this backend of a call that it can serve, such as which kernel it will take."""
        return ()

    def verify(self, function: str, *args: Any, **kwargs: Any) -> Verdict:
        """What `<function>_verifier` says of a call; accepts where there is none. A convenience: exceptions propagate.

        Dispatch asks the verifiers themselves, unless a backend overrides this method: then it asks this one.
        """
        verifier = getattr(self, f'{function}_verifier', None)
        return (True, None) if verifier is None else verifier(*args, **kwargs)


def overrides(backend: BaseBackend, method: str) -> bool:
    """Whether the backend defines `method` itself."""
    found = getattr(backend, method)
    return getattr(found, '__func__', found) is not getattr(
        getattr(BaseBackend, method), '__func__', getattr(BaseBackend, method)
    )


def verdict_of(answer: Any, question: str = 'is_available') -> Verdict:
    """An availability answer, a bool or `(bool, reason)`, as a verdict. Nothing else counts as yes."""
    if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], bool):
        return answer
    if isinstance(answer, bool) or answer is None:
        return (True, None) if answer else (False, f'{question}() says no')
    return False, f'{question}() must return a bool or (bool, reason), got {type(answer).__name__}'


def enabled_by_default(backend: BaseBackend) -> bool:
    """What `default_enable` says. Read off the class: on the instance, a function would be a method."""
    default = vars(backend).get('default_enable', type(backend).default_enable)
    return as_boolean(default() if callable(default) else default)


def as_boolean(answer: Any) -> bool:
    """An answer to "is it on?".

    Raises:
        TypeError: for something else than a bool: the text 'no' would be true.
    """
    if answer is None or isinstance(answer, (bool, int)):
        return bool(answer)
    raise TypeError(f'a bool is needed, got {answer!r}')


def toggle_state(name: str | None, default: bool | Callable[[], bool]) -> bool:
    """What the environment variable `name` says now, `default` where it is unset or no boolean."""
    text = os.environ.get(name) if name else None
    stated = parse_boolean(text) if text is not None else None
    if stated is not None:
        return stated
    return bool(default() if callable(default) else default)


def check_package(module: str | None, version: str | None = None) -> Verdict:
    """Whether `module` is installed, and its distribution satisfies `version`, without importing it."""
    if module is None:
        return True, None
    try:
        found = sys.modules.get(module) is not None or importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        found = False
    if not found:
        return False, f'package {module!r} is not installed'
    return (True, None) if version is None else _check_version(module, version)


def _check_version(module: str, version: str) -> Verdict:
    # here, because it costs a third of what importing this package may cost
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        requirement = Requirement(version if version.strip()[:1].isalnum() else f'{module}{version}')
    except InvalidRequirement as error:
        return False, f'package_version {version!r} is no version specifier: {error}'
    for distribution in (requirement.name, *importlib.metadata.packages_distributions().get(module.split('.')[0], ())):
        try:
            installed = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        if requirement.specifier.contains(installed, prereleases=True):
            return True, None
        return False, f'{distribution} {installed} is installed, {requirement.specifier} is needed'
    return False, f'package {module!r} has no version metadata, {requirement.specifier} is needed'
