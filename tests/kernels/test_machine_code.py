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
    found = count(SASS)
    assert found == Code(at_once=[3, 1], before_wait=[2], copies=[], fetched=0, barriers=1, shuffles=1)


def test_loads_whose_address_waits_for_another_are_no_run() -> None:
    chain = SASS.replace("[R18.64]", "[R8.64]")
    assert count(chain).at_once == [2, 2]  # the last two are under way together


def test_copies_to_shared_memory_count_until_they_are_waited_for() -> None:
    found = count("""
        /*0010*/                   CCTL.E.PF2 [R8] ;
        /*0020*/                   ACQBULK ;
        /*0030*/              @!P0 LDGSTS.E.BYPASS.128 [R3], desc[UR26][R8.64], P2 ;
        /*0040*/                   LDGDEPBAR ;
        /*0050*/                   LDGSTS.E.BYPASS.128 [R3+0x4000], desc[UR26][R8.64], P6 ;
        /*0060*/                   DEPBAR.LE SB0, 0x0 ;
        /*0070*/                   CCTL.E.PF2 [R8] ;
        /*0080*/                   DEPBAR.LE SB0, 0x0 ;
""")
    assert found == Code(at_once=[], before_wait=[0], copies=[2], fetched=1, barriers=0, shuffles=0)
