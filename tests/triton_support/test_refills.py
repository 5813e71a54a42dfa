"""Loops of TTGIR as Triton writes them, simulated."""

import pytest

from tests.triton_support.refills import NotFollowed, refilled_too_early

BUFFERS = '  %x = ttg.local_alloc : () -> !ttg.memdesc<{}x64x64xbf16, #shared, #smem, mutable>'
INTO = '%into = ttg.memdesc_index %x[%next] : !ttg.memdesc<2x64x64xbf16> -> !ttg.memdesc<64x64xbf16>'
COPY = f'{INTO}\n%c = ttg.async_copy_global_to_local %p, %into mask %m : tensor<64x64x!tt.ptr<bf16>, #b> -> <64x64xbf16>'
FROM = '%from = ttg.memdesc_index %x[%now] : !ttg.memdesc<2x64x64xbf16> -> !ttg.memdesc<64x64xbf16>'
TYPES = '!ttg.memdesc<64x64xbf16, #shared> * !ttg.memdesc<64x64xbf16, #shared> -> tensor<64x64xf32, #mma>'
ASYNC = '{inputPrecision = 0 : i32, isAsync = true} : ' + TYPES
PRODUCT = f'{FROM}\n%d = ttng.warp_group_dot %from, %from, %acc {ASYNC}'
SYNC = f'%e = ttng.warp_group_dot %from, %from, %acc {{inputPrecision = 0 : i32}} : {TYPES}'
RESULT = '!ttg.memdesc<64x64xbf16, #shared>'
OTHER = f'%y = ttg.local_alloc %r : (tensor) -> {RESULT}\n%f = ttng.warp_group_dot %y, %y, %acc {ASYNC}'
THROUGH_A_VIEW = f'{FROM}\n%t = ttg.memdesc_trans %from : {RESULT}\n%d = ttng.warp_group_dot %t, %from, %acc {ASYNC}'
OF_A_WAIT = f'%d = ttng.warp_group_dot %w#1, %w#1, %acc {ASYNC}'
REGISTERS = f'{FROM}\n%d = ttng.warp_group_dot %r, %from, %acc {ASYNC.replace("!ttg.memdesc", "tensor", 1)}'


def wait(left):
    return f'%w:2 = ttng.warp_group_dot_wait %d, %from {{pendings = {left} : i32}} : tensor, !ttg.memdesc'


def of(buffers, *before, loop, head='%r:3 = scf.for %i = %c0 to %c9 step %c1 iter_args(%acc = %z) -> (i32) : i32 {'):
    """Returns TTGIR with a ring of `buffers` buffers, the lines before a loop, and its body."""
    lines = [BUFFERS.format(buffers), *('  ' + line for one in before for line in one.split('\n')), '  ' + head]
    lines += [f'    {line}' for one in loop for line in one.split('\n')]
    return '\n'.join([*lines, '    scf.yield %d', '  } loc(#loc)'])


@pytest.mark.parametrize(
    ('buffers', 'before', 'loop', 'refilled'),
    [
        (3, [COPY, COPY], [PRODUCT, wait(1), COPY], False),
        (2, [COPY, COPY], [PRODUCT, wait(1), COPY], True),
        (2, [COPY, COPY], [PRODUCT, wait(0), COPY], False),
        # The wait comes too late, or a synchronous product waits.
        (2, [COPY, COPY], [PRODUCT, COPY, wait(0)], True),
        (2, [COPY, COPY], [PRODUCT, SYNC, COPY], False),
        # One copy ahead: the copy before the product goes into the buffer that the previous product still reads.
        (2, [COPY], [COPY, PRODUCT, wait(1)], True),
        (2, [COPY], [PRODUCT, wait(1), COPY], False),
        (1, [], [COPY, PRODUCT, wait(0)], False),
        (1, [], [COPY, PRODUCT, wait(1)], True),
        # Two products a step, the second of registers.
        (2, [COPY, COPY], [PRODUCT, OTHER, wait(1), COPY], False),
        (2, [COPY, COPY], [PRODUCT, OTHER, wait(2), COPY], True),
        (2, [COPY, COPY], [OTHER, PRODUCT, wait(1), COPY], True),
        (3, [COPY, COPY], [PRODUCT, OTHER, wait(4), COPY], True),
        # The first product stands before the loop.
        (3, [COPY, COPY, COPY, PRODUCT], [PRODUCT, wait(1), COPY], False),
        (3, [COPY, COPY, COPY, PRODUCT], [PRODUCT, wait(2), COPY], True),
        # Products read another view, or the results of a wait, or only one operand from memory.
        (2, [COPY, COPY], [THROUGH_A_VIEW, wait(1), COPY], True),
        (2, [COPY, COPY], [FROM, wait(1), OF_A_WAIT, COPY], True),
        (3, [COPY, COPY], [FROM, wait(1), OF_A_WAIT, COPY], True),
        (4, [COPY, COPY], [FROM, wait(1), OF_A_WAIT, COPY], False),
        (2, [COPY, COPY], [REGISTERS, wait(1), COPY], True),
        (3, [COPY, COPY], [REGISTERS, wait(1), COPY], False),
    ],
)
def test_loops(buffers, before, loop, refilled):
    assert refilled_too_early(of(buffers, *before, loop=loop)) == ['%x'] * refilled


def test_loops_in_and_after_other_loops():
    bad, good = ([PRODUCT, wait(left), COPY] for left in (1, 0))
    inner = lambda body: of(2, COPY, COPY, loop=body)  # noqa: E731
    for loop, refilled in ((bad, ['%x']), (good, [])):
        assert refilled_too_early(of(3, COPY, COPY, loop=[inner(loop)])) == refilled
        assert refilled_too_early(of(3, COPY, COPY, loop=bad) + '\n' + inner(loop)) == refilled
    body = ['scf.condition(%c) %i', '} do {', *bad]
    text = of(2, COPY, COPY, loop=body, head='%r = scf.while (%a = %b) : (i32) -> i32 {').replace('    } do {', '  } do {')
    assert refilled_too_early(text) == ['%x']


@pytest.mark.parametrize(
    'line',
    [
        f'%d = ttng.warp_group_dot %carried, %from, %acc {ASYNC}',
        f'%v = arith.select %c, %from, %from\n%d = ttng.warp_group_dot %v, %v, %acc {ASYNC}',
        '%c = ttg.async_copy_global_to_local %p, %carried mask %m : tensor -> <64x64xbf16>',
        'ttng.async_tma_copy_global_to_local %desc[%a, %b] %into, %barrier, %true : !tt.tensordesc',
        f'%d = ttng.warp_group_dot %from * %from {ASYNC}',
    ],
)
def test_unknown_forms_are_errors(line):
    with pytest.raises(NotFollowed):
        refilled_too_early(of(2, COPY, COPY, loop=[PRODUCT, wait(0), line]))
