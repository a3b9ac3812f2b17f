"""Loads at once, as they are counted in machine code."""

from __future__ import annotations

from support.machine_code import Code, count

SASS = """
        /*0010*/                   LDG.E.EF.128 R4, desc[UR4][R2.64] ;   /* 0x1 */
        /*0020*/              @!P0 LDG.E.128 R8, desc[UR4][R2.64+0x200] ;
        /*0030*/                   ACQBULK ;
        /*0040*/                   LDG.E R20, desc[UR4][R16.64] ;
        /*0050*/                   LDG.E.128 R12, desc[UR4][R18.64] ;
        /*0060*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0070*/                   SHFL.IDX PT, R21, R20, R22, 0x1f ;
        /*0080*/                   FFMA R24, R10, R20, R24 ;
        /*0090*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*00a0*/                   IMAD.U32 R25, R7, 0x10000, RZ ;
"""


def test_loads_count_until_one_of_them_is_used() -> None:
    assert count(SASS) == Code(at_once=[3, 1], before_wait=[2], barriers=1, shuffles=1)


def test_loads_whose_address_waits_for_another_are_no_run() -> None:
    chain = SASS.replace("[R18.64]", "[R8.64]")
    assert count(chain).at_once == [2, 2]  # the last two are under way together
