"""The base class of backends.

A backend declares its facts (attributes), when it can run (`is_available`, `is_enabled`, `<fn>_verifier`, `<fn>_prefers`)
and its implementations (`<fn>`) of some of an operation's functions. The framework enforces every declared fact:
`fla.backends.plan.plan` turns it into a test with a reason, and `explain` shows the same test.
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

# A reason is constant text, or a template and its values, formatted only when read: formatting a symbolic size inside a
# compiled verifier would specialise that size.
Reason = str | tuple[Any, ...] | None
Verdict = tuple[bool, Reason]

KINDS = ('vendor', 'native', 'default', 'reference')
RESERVED_NAMES = ('default', 'triton', 'reference')

DEFAULT_PRIORITY = 5
DEFAULT_IMPLEMENTATION_PRIORITY = 100
REFERENCE_PRIORITY = 1000


def format_reason(reason: Reason) -> str:
    """Returns a verifier's reason as text."""
    if reason is None or (isinstance(reason, tuple) and not reason):
        return 'no reason given'
    if not isinstance(reason, tuple):
        return str(reason)
    template, *values = reason
    try:
        return str(template) % tuple(values)
    except Exception:  # a wrong template must not end the user's call
        return ' '.join([str(template), *map(_value_text, values)])


def _value_text(value: Any) -> str:
    try:
        return str(value)
    except Exception:  # its __str__ raises
        return f'<{type(value).__name__}>'


_MISSING = object()

ChangeListener = Callable[[Any, str], None]

# (called before, called after) a change
_listeners: list[tuple[ChangeListener, ChangeListener]] = []


def on_change(before: ChangeListener, after: ChangeListener) -> None:
    """Calls `before(owner, name)` and `after(owner, name)` around each change of an attribute of a backend or its class.

    An exception in `before` prevents the change.
    """
    _listeners.append((before, after))


def _notify(when: int, owner: Any, name: str) -> None:
    if not name.startswith(('_abc_', '__')):
        for listeners in _listeners:
            listeners[when](owner, name)


# Threads between a change and the call of the listeners. A forked child may have the change without the call.
_changing_threads: set[int] = set()


@contextlib.contextmanager
def _changing(owner: Any, name: str) -> Iterator[None]:
    _notify(0, owner, name)
    if torch.compiler.is_dynamo_compiling():  # Dynamo cannot trace a question about threads
        yield
        _notify(1, owner, name)
        return
    me = threading.get_ident()
    is_outermost = me not in _changing_threads
    _changing_threads.add(me)
    try:
        yield
        _notify(1, owner, name)
    finally:
        if is_outermost:
            _changing_threads.discard(me)


def changes_of_other_threads() -> bool:
    """Whether another thread is changing a backend; in a forked child: was changing one at the fork."""
    return bool(_changing_threads - {threading.get_ident()})


def _is_same(attributes: Mapping[str, Any], name: str, value: Any) -> bool:
    """Whether setting an attribute changes nothing."""
    old = attributes.get(name, _MISSING)
    return old is value or (type(old) is type(value) and isinstance(value, (bool, int, float, str)) and old == value)


class BackendMeta(ABCMeta):
    """Reports changed attributes to dispatch, so that `monkeypatch.setattr(MyBackend, 'priority', 1)` affects the next call,
    compiled callers included. Derives from ABCMeta so that backends may mix in ABCs."""

    def __setattr__(cls, name: str, value: Any) -> None:
        if not _is_same(vars(cls), name, value):
            with _changing(cls, name):
                super().__setattr__(name, value)

    def __delattr__(cls, name: str) -> None:
        with _changing(cls, name):
            super().__delattr__(name)


class BaseBackend(metaclass=BackendMeta):
    """Base class of backends.

    For a dispatched function `f` a backend may define
        `f(self, ...)`: the implementation. It names the parameters it honours; the framework refuses a call that sets
            another one to a value other than its default (`**kwargs` does not count as honouring).
        `f_verifier(self, ...)`: names only the parameters it reads and returns `(True, None)` or `(False, reason)`.
        `f_prefers(self, ...)`: the same form; False demotes the backend behind the other eligible ones.

    Attributes:
        backend_type: the backend's name, unique within an operation.
        package_name: module that must be importable, or None.
        package_version: version specifier ('>=1.2') of the distribution, or a requirement ('some-dist>=1.2') if the
            distribution and the module have different names.
        env_var: environment variable of the toggle, or None. A set toggle overrides `default_enable`.
        default_enable: bool, or a function without arguments that is called when a plan is built.
        priority: lower is asked earlier.
        kind: 'vendor' (a third party's package), 'native' (this project's own) or 'reference' (plain PyTorch).
        vendor: its maker, for policy tokens `vendor:NAME`.
        devices: platforms ('cpu', 'cuda', 'rocm', 'xpu', 'npu', 'mps', 'meta') the first tensor argument may be on, or a
            mapping from parameter names to platforms. None for any. 'cuda' never includes ROCm.
        dtypes: dtypes of the first tensor argument, or a mapping from parameter names to dtypes. None for any.
        min_capability: lowest compute capability, such as (9, 0); compared on `cuda` only.
        grad: 'backward' if it is differentiable, 'none' if it is for inference only.
        tolerance: bound of the relative RMS error per dtype, for tests.
        extra_env: environment variables that an overridden `is_enabled()` reads.
        traceable: False if torch.compile cannot trace its verifiers: compiled code then skips the backend.
        retryable: exception types after which another backend may be tried.
        verified: whether it was tested with its real package.
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
        if not _is_same(vars(self), name, value):
            with _changing(self, name):
                object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        with _changing(self, name):
            object.__delattr__(self, name)

    def __repr__(self) -> str:
        return f'<{type(self).__name__} {self.impl_id}>'

    @property
    def impl_id(self) -> str:
        """`kind.backend_type`, for policy tokens `impl:…`."""
        return f'{self.kind}.{self.backend_type}'

    @classmethod
    def is_available(cls) -> bool | Verdict:
        """Whether this machine has what every call needs: package, version, toolchain.

        Called when a plan is built and cached until `refresh()`. Must not touch an accelerator: `probe` may. Overrides
        return a bool, or `(False, reason)`; an exception counts as a reason.
        """
        return check_package(cls.package_name, cls.package_version)

    def probe(self, device: Device) -> bool | Verdict:
        """Whether the backend works on a device. Called before the first call there and cached per kind of device.

        For a package that may import and then fail, run its smallest real call here. An exception counts as a reason.
        """
        return True

    @classmethod
    def is_enabled(cls) -> bool:
        """Whether the toggle enables the backend. An override lists the variables it reads in `extra_env`."""
        return toggle_state(cls.env_var, cls.default_enable)

    @classmethod
    def can_use(cls) -> bool:
        """Whether the backend is available and enabled now. A convenience: dispatch asks the two separately."""
        return verdict_of(cls.is_available())[0] and bool(cls.is_enabled())

    def explain_notes(self, function: str, arguments: Mapping[str, Any]) -> Sequence[str]:
        """Returns notes for `explain` on a call that this backend can serve, such as the kernel it will run."""
        return ()

    def verify(self, function: str, *args: Any, **kwargs: Any) -> Verdict:
        """Returns the verdict of `<function>_verifier`; accepts if there is none. A convenience: exceptions propagate.

        Dispatch calls the verifiers themselves, unless a backend overrides this method.
        """
        verifier = getattr(self, f'{function}_verifier', None)
        return (True, None) if verifier is None else verifier(*args, **kwargs)


def overrides(backend: BaseBackend, method: str) -> bool:
    """Whether the backend defines `method` itself."""
    own, base = getattr(backend, method), getattr(BaseBackend, method)
    return getattr(own, '__func__', own) is not getattr(base, '__func__', base)


def belongs_to(backend: BaseBackend, owner: Any) -> bool:
    """Whether a backend is `owner`, or an instance of the class `owner`."""
    return backend is owner or (isinstance(owner, type) and isinstance(backend, owner))


def verdict_of(answer: Any, question: str = 'is_available') -> Verdict:
    """Returns an availability answer, a bool or `(bool, reason)`, as a verdict. Anything else counts as no."""
    if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], bool):
        return answer
    if isinstance(answer, bool) or answer is None:
        return (True, None) if answer else (False, f'{question}() returned {answer}')
    return False, f'{question}() must return a bool or (bool, reason), got {type(answer).__name__}'


def enabled_by_default(backend: BaseBackend) -> bool:
    """Returns the value of `default_enable`. Read from the class: on the instance, a function would be a method."""
    default = vars(backend).get('default_enable', type(backend).default_enable)
    return as_boolean(default() if callable(default) else default)


def as_boolean(answer: Any) -> bool:
    """Returns whether a backend is enabled.

    Raises:
        TypeError: unless the answer is a bool, an int or None. The text 'no' would be true.
    """
    if answer is None or isinstance(answer, (bool, int)):
        return bool(answer)
    raise TypeError(f'a bool is needed, got {answer!r}')


def toggle_state(name: str | None, default: bool | Callable[[], bool]) -> bool:
    """Returns the value of the environment variable `name`, or `default` if it is unset or not a boolean."""
    text = os.environ.get(name) if name else None
    stated = parse_boolean(text) if text is not None else None
    return stated if stated is not None else bool(default() if callable(default) else default)


def check_package(module: str | None, version: str | None = None) -> Verdict:
    """Whether `module` is installed and its distribution satisfies `version`. Does not import it."""
    if module is None:
        return True, None
    try:
        found = sys.modules.get(module) is not None or importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        found = False
    if not found:
        return False, f'package {module!r} is not installed'
    return (True, None) if version is None else _check_version(module, version)


def requirement_of(version: str, module: str) -> Any:
    """Returns a `packaging` Requirement for `package_version`. Raises ValueError if it is malformed."""
    # imported here: it takes a third of the time that importing this package may take, and few backends name a version
    from packaging.requirements import Requirement

    return Requirement(version if version.strip()[:1].isalnum() else f'{module}{version}')


def _check_version(module: str, version: str) -> Verdict:
    try:
        requirement = requirement_of(version, module)
    except ValueError as error:
        return False, f'package_version {version!r} is not a version specifier: {error}'
    for distribution in (requirement.name, *importlib.metadata.packages_distributions().get(module.split('.')[0], ())):
        try:
            installed = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        if requirement.specifier.contains(installed, prereleases=True):
            return True, None
        return False, f'{distribution} {installed} is installed, {requirement.specifier} is needed'
    return False, f'package {module!r} has no version metadata, {requirement.specifier} is needed'
