"""Frozen dispatch: plans that read no environment, and a manifest of the selections.

For serving and for caches of compiled code. After `freeze_dispatch()` toggles are not read, and changing a policy or a
registry raises; under `on_error='fallback'` circuit breakers still work. The manifest's sha256 can be part of a cache key,
or be required on another host or rank.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform as python_platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fla.backends.backend.base import format_reason
from fla.backends.core.device_label import version_of
from fla.backends.core.errors import ManifestMismatchError
from fla.backends.core.tensors import ANY
from fla.backends.plan.plan import build
from fla.backends.policy.precedence import Layer
from fla.backends.runtime.dispatcher import Dispatcher, owner_of
from fla.backends.runtime.situation import Frozen


class Manifest(dict[str, Any]):
    """Selections as JSON-ready values; `sha256` covers everything else."""

    @property
    def sha256(self) -> str:
        """Hash of the content."""
        return str(self['sha256'])

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        Path(path).write_text(json.dumps(self, indent=1, sort_keys=True) + '\n', encoding='utf-8')


def _hash(content: Mapping[str, Any]) -> str:
    canonical = json.dumps({k: v for k, v in content.items() if k != 'sha256'}, sort_keys=True, separators=(',', ':'))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _portable(text: str, owner: Dispatcher, layers: Iterable[Layer]) -> str:
    """The text without the places of scopes and the paths of policy files, which differ between hosts and select nothing."""
    words: dict[str, str] = {}
    for layer in layers:
        places = {place for _, place in layer.policy.places} | {rule.place for rule in layer.policy.rules}
        words |= dict.fromkeys(places, 'its file') | {layer.source: owner.policies.kind_of(layer)}
    for word in sorted(filter(None, words), key=len, reverse=True):
        text = text.replace(word, words[word])
    return text


def manifest(dispatcher: Dispatcher | None = None, *, platforms: tuple[str, ...] = ()) -> Manifest:
    """The candidates of every known function in order, by platform, and why others are out.

    Args:
        dispatcher: the namespace; default: fla's own.
        platforms: platforms to answer for. Default: those of the calls so far, else 'cpu'.
    """
    return _manifest(owner_of(dispatcher), lambda key: platforms)


def _manifest(owner: Dispatcher, platforms: Callable[[str], tuple[str, ...]]) -> Manifest:
    """`platforms(key)`: platforms to answer for; empty for those of the function's calls so far."""
    owner.discovery.load_all()
    state = owner.policies.state
    selections = {}
    packages: set[str] = set()
    for key, entry in sorted(owner.catalogue.functions().items()) if not owner.baseline else ():
        policy = entry.policy(state)
        names = platforms(key) or entry.platforms or ('cpu',)
        plan = build(entry.spec.signature, entry.members(), policy, names, entry.facts(policy))
        orders = list(plan.chains.items())
        for platform, cases in plan.cases.items():
            for case in cases:
                when = case.conditional.condition.text if case.conditional.condition else 'always'
                orders.append((f'{platform} when {when}', case.chain))
        chains: dict[str, Any] = {}
        for name, chain in orders:
            rows = []
            for c in chain:
                off = c.gate is not None and not c.gate.is_on
                out = c.out or (('disabled', c.gate.says_off) if c.gate and off else None)
                reason = _portable(f'{out[0]}: {format_reason(out[1])}', owner, state.layers) if out else None
                rows.append({'backend': c.member.name, 'out': reason})
                if out is None and c.member.backend.package_name:
                    packages.add(c.member.backend.package_name)
            chains.setdefault(name, rows)  # of two rules with the same condition only the first is asked
        selections[key] = chains
    content = {
        'namespace': owner.namespace,
        'versions': {
            'python': python_platform.python_version(),
            'torch': torch.__version__,
            **{name: version_of(name) for name in ('fla-dispatch', 'triton', *sorted(packages))},
        },
        'policy': [{'source': owner.policies.kind_of(layer), **layer.policy.to_dict()} for layer in state.layers],
        'selections': selections,
    }
    file = owner.policies.now.file
    if file is not None:
        content['policy_file'] = {'file': os.path.basename(file.source), 'sha256': file.sha256}
    return Manifest({**content, 'sha256': _hash(content)})


def freeze_dispatch(dispatcher: Dispatcher | None = None, *, platforms: tuple[str, ...] = ()) -> Manifest:
    """Fix policy and toggles at their current values: changes of policy or registry raise FrozenError until
    `thaw_dispatch()`. Loads every operation. Verifiers still run on each call; `resolve()` removes them, too.

    Args:
        dispatcher: the namespace; default: fla's own.
        platforms: platforms that the manifest answers for. Default: those of the calls so far, else 'cpu'.

    Returns:
        The manifest.
    """
    owner = owner_of(dispatcher)
    owner.discovery.load_all()
    owner.policies.now  # noqa: B018 - reads the environment
    if owner.policies.frozen is None:
        backends = list(owner.catalogue.backends())
        names = {name for backend in backends for name in owner.toggles.variables(backend)}
        env = tuple(sorted((name, os.environ.get(name)) for name in names))
        enabled = {backend: owner.toggles.gate(backend).is_on for backend in backends}
        owner.control.change(lambda now: replace(now, frozen=Frozen(now.state.layers, env, enabled)))
    return manifest(owner, platforms=platforms)


def thaw_dispatch(dispatcher: Dispatcher | None = None) -> None:
    """End `freeze_dispatch()`; does nothing if dispatch is not frozen."""
    owner_of(dispatcher).control.change(lambda now: replace(now, frozen=None))


def is_frozen(dispatcher: Dispatcher | None = None) -> bool:
    """Whether dispatch is frozen."""
    return owner_of(dispatcher).policies.frozen is not None


def require_manifest(expected: str | Path | Mapping[str, Any], dispatcher: Dispatcher | None = None) -> Manifest:
    """Check that this process selects exactly as `expected` says; returns this process's manifest.

    Args:
        expected: a manifest, or the path of a saved one.

    Raises:
        ManifestMismatchError: lists every difference.
        ValueError: if `expected` is not a manifest.
    """
    wanted: Any = expected
    if not isinstance(expected, Mapping):
        try:
            wanted = json.loads(Path(expected).read_text(encoding='utf-8'))
        except ValueError as error:  # not JSON, or not text
            raise ValueError(f'{expected} is not a manifest saved by freeze_dispatch().save(path): {error}') from None
    if not isinstance(wanted, Mapping) or not {'selections', 'versions', 'policy', 'sha256'} <= wanted.keys():
        raise ValueError('expected must be a manifest, or the path of one saved by freeze_dispatch().save(path)')
    if wanted['sha256'] != _hash(wanted):
        raise ManifestMismatchError('the manifest was edited: its sha256 does not fit its content')
    selections: Mapping[str, Mapping[str, Any]] = wanted['selections']
    have = _manifest(
        owner_of(dispatcher), lambda key: tuple(p for p in selections.get(key, ()) if p != ANY and ' when ' not in p)
    )
    if have.sha256 != wanted['sha256']:
        raise ManifestMismatchError('this process differs from the manifest:\n' + '\n'.join(_differences(wanted, have, '')))
    return have


def _differences(wanted: Any, have: Any, path: str) -> list[str]:
    if isinstance(wanted, Mapping) and isinstance(have, Mapping):
        found = []
        for key in sorted({*wanted, *have} - {'sha256'}):
            found += _differences(wanted.get(key), have.get(key), f'{path}.{key}' if path else str(key))
        return found
    return [] if wanted == have else [f'  {path}: manifest {wanted!r}, here {have!r}']
