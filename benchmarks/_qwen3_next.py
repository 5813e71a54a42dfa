"""A random Qwen3-Next of transformers, and what its linear attention calls. For whichever package named `fla` is on the
path."""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any

# Nothing is to be fetched, whatever a model would like, and no kernel of a third party is to run.
os.environ |= {'HF_HUB_OFFLINE': '1', 'USE_HUB_KERNELS': '0'}

import torch
from transformers import AutoModelForCausalLM, Qwen3NextConfig
from transformers.models.qwen3_next import modeling_qwen3_next as modeling

# One period of the layers of Qwen3-Next-80B-A3B, at its widths, which are the config's defaults. Ten experts are active for
# a token there, of 512; here they are all there is, so that no token takes another way because of a rounding. The
# vocabulary is a fifth as large.
SIZES: dict[str, Any] = {'num_hidden_layers': 4, 'num_experts': 10, 'num_experts_per_tok': 10, 'vocab_size': 32768}
TINY: dict[str, Any] = {
    'vocab_size': 97,
    'hidden_size': 64,
    'num_hidden_layers': 4,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'head_dim': 16,
    'linear_num_key_heads': 2,
    'linear_num_value_heads': 4,
    'linear_key_head_dim': 16,
    'linear_value_head_dim': 16,
    'moe_intermediate_size': 32,
    'shared_expert_intermediate_size': 32,
    'num_experts': 4,
    'num_experts_per_tok': 4,
    # wider than the usual 0.02, so that no layer is negligible
    'initializer_range': 0.1,
}
DELTA_RULE = ('torch_chunk_gated_delta_rule', 'torch_recurrent_gated_delta_rule')
CONVOLUTION = ('causal_conv1d_fn', 'causal_conv1d_update')
FUNCTIONS = (*DELTA_RULE, *CONVOLUTION)
CACHE = 'cache' if 'cache' in inspect.signature(modeling.Qwen3NextForCausalLM.forward).parameters else 'past_key_values'
"""The name of that argument, which changes with transformers' versions."""

Model = Any


def build(sizes: dict[str, Any], device: str) -> Model:
    """The same weights in each process on the same device: bfloat16, made where they stay."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(Qwen3NextConfig(**sizes), dtype=torch.bfloat16, attn_implementation='sdpa')
    for layer in linear_layers(model):
        # steps from 0.001 to 0.1, as Mamba-2 begins: with transformers' own, of 1.3, a state is forgotten within a token
        step = torch.logspace(-3, -1, layer.num_v_heads, device=device)
        layer.dt_bias.data.copy_(step + torch.log(-torch.expm1(-step)))
    return model.eval()


def in_float32(model: Model) -> Model:
    """The same model, each of its numbers in float32."""
    wide = copy.deepcopy(model).float()
    wide.set_experts_implementation('eager')
    return wide


def linear_layers(model: Model) -> list[Any]:
    return [layer.linear_attn for layer in model.model.layers if hasattr(layer, 'linear_attn')]


def fingerprint(model: Model) -> int:
    """Of all weights, to the bit."""
    return sum(int(one.detach().view(torch.int16).sum(dtype=torch.int64)) for one in model.parameters())


@contextlib.contextmanager
def plain() -> Iterator[None]:
    """Within it, transformers runs its own PyTorch code."""
    with _in_place_of({name: inspect.unwrap(getattr(modeling, name)) for name in FUNCTIONS}):
        yield


@contextlib.contextmanager
def with_modules(model: Model) -> Iterator[None]:
    """Within it, the short convolutions and the gated norms are those of `fla.modules` too."""
    fla = importlib.import_module('fla.modules')
    short = importlib.import_module('fla.modules.convolution')
    layers = linear_layers(model)
    kept = [layer.norm for layer in layers]
    for layer in layers:
        norm = fla.FusedRMSNormGated(
            layer.head_v_dim, eps=layer.layer_norm_epsilon, activation='silu', device=layer.norm.weight.device
        )
        norm.weight = layer.norm.weight
        layer.norm = norm
    try:
        with _in_place_of(dict(zip(CONVOLUTION, _convolutions(short), strict=True))):
            yield
    finally:
        for layer, norm in zip(layers, kept, strict=True):
            layer.norm = norm


def _convolutions(short: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Of the package, called as transformers calls its own: channels before time."""

    def all_at_once(implementation: Callable[..., Any]) -> Callable[..., Any]:
        def convolve(x: Any, weight: Any, bias: Any = None, activation: str | None = None, **_: Any) -> Any:
            return implementation(x.transpose(1, 2), weight, bias, activation=activation)[0].transpose(1, 2)

        return convolve

    def step(implementation: Callable[..., Any]) -> Callable[..., Any]:
        def convolve(x: Any, state: Any, weight: Any, bias: Any = None, activation: str | None = None) -> Any:
            done = implementation(x.squeeze(-1), state, weight=weight, bias=bias, activation=activation)
            return (done[0] if isinstance(done, tuple) else done).unsqueeze(-1)

        return convolve

    return all_at_once(short.causal_conv1d), step(short.causal_conv1d_update)


@contextlib.contextmanager
def _in_place_of(functions: dict[str, Callable[..., Any]]) -> Iterator[None]:
    kept = {name: getattr(modeling, name) for name in functions}
    for name, function in functions.items():
        setattr(modeling, name, function)
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(modeling, name, function)


def serves(model: Model) -> dict[str, str]:
    """What transformers calls at present for each function of linear attention, and for the gated norm."""
    found = {}
    for name in FUNCTIONS:
        function = getattr(modeling, name)
        behind = inspect.getclosurevars(function).nonlocals.get('implementation', function)
        found[name] = f'{behind.__module__}.{behind.__qualname__}'
    norm = type(linear_layers(model)[0].norm)
    return {**found, 'norm': f'{norm.__module__}.{norm.__qualname__}'}


def check_found(model: Model) -> None:
    """Raises ImportError where transformers did not find `fla`: it would say nothing and run its own code."""
    missing = [name for name in DELTA_RULE if not serves(model)[name].startswith('fla.')]
    if missing:
        try:
            importlib.import_module('fla.ops.gated_delta_rule')
            why = 'it can be imported'
        except Exception as error:
            why = f'{type(error).__name__}: {error}'
        raise ImportError(f'transformers did not find {", ".join(missing)} in `fla` ({why})')
