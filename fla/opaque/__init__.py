"""Extension kernels that PyTorch cannot trace (CUTLASS, TileLang, a vendor's wheel), made safe to call from anywhere.

`opaque()` turns a kernel into one function with two paths to the same code:

1. Eager path, for plain tensors on the kernel's device outside any tracing or transform. It runs the kernel directly,
   without PyTorch's dispatcher, and inside a plain `torch.autograd.Function` if a gradient is wanted. Choosing the path
   costs 0.8 x `torch.empty(0)`.
2. Operator path, for everything else (Dynamo, `torch.export`, FakeTensor, meta, tensor subclasses, dispatch modes,
   `torch.func`). It calls a library operator with a fake implementation and the same gradient.

The gradient belongs to the operator. The usual alternative, an `autograd.Function` around an operator without a gradient,
is silently wrong in torch 2.13: Dynamo inlines the Function, then `torch.func.grad` in compiled code gives zeros and an
exported module has no gradient.

Derivatives that a kernel cannot give raise instead of being lost: `torch.func.grad`, forward-mode AD, double backward, and
that of an input which requires grad but is not in `grads`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fla.opaque.declaration import Kernel, declare
from fla.opaque.entry import OpaqueKernel, entry_point, takes_eager_path
from fla.opaque.operators import define_operators
from fla.opaque.vmap import loop_under_vmap

__all__ = ['OpaqueKernel', 'loop_under_vmap', 'opaque', 'takes_eager_path']


def opaque(
    name: str,
    *,
    schema: str,
    forward: Kernel,
    fake: Kernel,
    backward: Kernel | None = None,
    grads: Sequence[str] = (),
    intermediates: Sequence[str] = (),
    non_differentiable: Sequence[str] = (),
    fake_backward: Kernel | None = None,
    devices: Sequence[str] = ('cuda',),
) -> OpaqueKernel:
    """Wrap an untraceable kernel for eager code, `torch.compile`, `torch.export` and fake tensors.

        def forward(q, k, v, scale):                     # tensors in, new tensors out
            o, lse = vendor.attention_fwd(q, k, v, scale)
            return o, lse

        def backward(q, k, v, o, lse, do, scale):        # names inputs, outputs and `d<output>`, in any order
            return vendor.attention_bwd(do, q, k, v, o, lse, scale)

        attention = opaque(
            'fla::vendor_attention',
            schema='(Tensor q, Tensor k, Tensor v, float scale) -> (Tensor o, Tensor lse)',
            forward=forward,
            fake=lambda q, k, v, scale: (torch.empty_like(v), q.new_empty(q.shape[:-1], dtype=torch.float32)),
            backward=backward,
            grads=('q', 'k', 'v'),                       # what backward returns, in this order
            intermediates=('lse',),                      # for backward alone: attention(...) returns o
        )

    Args:
        name: `'namespace::name'` of the operator. `name_forward` and `name_backward` are defined too, below autograd.
        schema: arguments and results without the name, in PyTorch's schema language.
            - Arguments are positional, without defaults: an operator drops defaults before the kernel sees them. Write them
              in the calling function.
            - A number that derives from a size is `SymInt`; with `int`, each size compiles again.
            - Tensors are `Tensor` or `Tensor?`, the first one `Tensor`. Lists of tensors are not supported: autograd does
              not look into them.
            - `Tensor(a!) cache` says that the kernel writes into it, for inference only.
            - Results need names if there is a backward.
        forward: called with all arguments by position. Returns one tensor, or several in a tuple, as the schema says.
            Results must be new memory, shared neither with an input nor with another result; compiled code checks that,
            eager code does not. Inputs have the caller's strides, also when compiled.
        fake: same arguments, but tensors without data and maybe symbolic sizes. Returns empty tensors of the right shape,
            dtype, device *and strides*.
        backward: computes gradients, without autograd. Its parameter names choose what is saved: an input; a result,
            intermediates included; the gradient of a result (`do` for a result `o`; with any strides, 0 included; None only
            if the result was None); or `needs_input_grad`, a tuple of bools parallel to `grads`. Returns one gradient per
            name in `grads`; None only if the input is None or needs no gradient.
        grads: the inputs that backward differentiates. A call with another input that requires grad raises.
        intermediates: the last results, read by backward alone; the caller does not get them.
        non_differentiable: results without a gradient (indices, a log-sum-exp for the caller). Backward must name all others
            as `d<result>`.
        fake_backward: like `fake`, with backward's arguments. By default a gradient is contiguous with its input's shape,
            dtype and device, and compiled code converts what backward returns to that.
        devices: torch device types that the kernel runs on; `'cuda'` includes ROCm.

    Returns:
        The function to call. It returns the visible result, a tuple of several, or None.

    Defining a name again with the same schema (a module reloaded, a notebook cell run twice) replaces the kernels.
    Autocast does not cast the inputs, and stays on inside the kernels. `torch.vmap` loops over the samples, in a backward
    inside it too. Not supported: the older vmap of `is_grads_batched=True`, and `torch.jit.trace`, which would record the
    numbers of one run.

    Raises:
        TypeError, ValueError: here, for an inconsistent declaration; says which argument and what to do.
        RuntimeError: when called, for `torch.func.grad`, forward-mode AD and inputs that require grad but have no
            gradient; in a second backward; in compiled code, for results that share memory.
        NotImplementedError: when called with tensors on a device that is not in `devices`.
    """
    caller = sys._getframe(1)
    declaration = declare(
        name, schema, forward, fake, backward, grads, intermediates, non_differentiable, fake_backward, devices
    )
    function = entry_point(declaration, define_operators(declaration, caller.f_code.co_filename))
    function.__module__ = caller.f_globals.get('__name__', '')
    return function
