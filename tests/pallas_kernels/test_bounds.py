"""Cycles are counted by regions of a schedule and loops of machine code; a kernel that has more is reported."""

from __future__ import annotations

import pytest

from tests.pallas_kernels import bounds, bundles, loops

SCHEDULE = """\
     0   :  { %s1 = smov 0 }
   0x1 LB: > { %v1 = vmatmul.bf16.gmra.mxu0 %v0  ;;  %v2 = vpop.f32.mrf.mxu0 }
   0x2   : > { %v3 = vpow2.f32 %v2  ;;  %v4 = vadd.f32 %v2, %v3 }
   0x3   : > { %7 = dma.hbm_to_vmem [thread:$0]  (!%p4), /*hbm=*/%s1, /*size_in_granules=*/64, /*vmem=*/%s2 }
   0x4   : > { vst [vmem:[#allocation9_spill]] %v4  ;;  vst [vmem:[%s2]] %v3 }
   0x5 LB: > { %s3 = sadd.s32 1, %s1 }
   0x6   :  { %s4 = sadd.s32 1, %s1 }
"""
CODE = """\
        /*0000*/                   MOV R1, 0x1 ;
.L_x_0:
        /*0010*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR28], R24 ;
        /*0020*/                   MUFU.EX2 R3, R4 ;
{more}
        /*0100*/              @!P1 BRA `(.L_x_0) ;
.L_x_1:
{more}
        /*0200*/              @P1 BRA `(.L_x_1) ;
        /*0210*/                   EXIT ;
.L_x_2:
        /*0220*/                   SYNCS.PHASECHK R3, R4 ;
        /*0230*/              @!P1 BRA `(.L_x_0) ;
"""
REGION = {"bundles": 1000, "depth": 1, "results": 1, "exps": 900, "arithmetic": 1, "stores": 2, "spills": 1}
REGION |= {"copied": 0, "mxu": 1}


def test_a_region_is_counted_with_what_it_copies():
    first, second, third = bundles.regions(SCHEDULE)
    assert second == REGION | {"bundles": 4, "exps": 1, "copied": 2048}
    assert bundles.steps([first, second, third]) == [second]


def test_a_step_that_copies_more_than_it_computes_is_bound_by_memory():
    line = bundles.other_row("k", "v6e", [REGION | {"copied": 2**20}])
    assert "| 1,024 | memory: 1,121 | 1.12 |" in line  # 1 MiB at 1,638 GB/s, 1.751 GHz
    assert "| 0 | exps: 900 | 0.90 |" in bundles.other_row("k", "v6e", [REGION])
    inner = [REGION | {"depth": 2}, REGION | {"exps": 0, "copied": 2**20}]  # the copies are those of many such regions
    assert "| 0 | exps: 900 | 0.90 |" in bundles.other_row("k", "v6e", inner)


def test_a_loop_is_counted_without_what_waits_beside_it():
    more = "\n".join(f"        /*{n:04x}*/  FADD R1, R2, R3 ;" for n in range(48, 48 + loops.SMALLEST))
    (loop,) = loops.loops(CODE.replace("{more}", more))
    assert loop == loops.Loop(instructions=3 + loops.SMALLEST, products=64, special=8)
    assert loop.bound == ("products", 64)


@pytest.mark.parametrize("more,code", [(1.0, 0), (1.04, 0), (1.06, 1), (0.5, 0)])
def test_a_kernel_with_five_percent_more_cycles_is_reported(more, code, monkeypatch, tmp_path, capsys):
    grown = REGION | {"bundles": int(1000 * more), "exps": int(900 * more)}
    table = tmp_path / "BOUNDS.md"
    table.write_text("# head\n" + "\n".join(bundles.other_row("k", chip, [REGION]) for chip in bounds.TPUS))
    monkeypatch.setattr(bounds, "TABLE", table)
    monkeypatch.setattr(bounds, "rows", lambda chip, only: iter([("others", bundles.other_row("k", chip, [grown]))]))
    assert bounds.check(bounds.TPUS) == code
    assert f"1,000 -> {int(1000 * more):6,}" in capsys.readouterr().out


def test_new_rows_replace_those_of_the_same_kernel_and_chip_and_the_others_stay():
    old = bounds.committed()
    table, line = old[1]
    row = (table, line.replace(line.split(" | ")[2], "12,345"))
    assert row != old[1] and bounds.merged(old, [row]) == [old[0], row, *old[2:]]
    added = (table, line.replace("| ", "| another kernel, ", 1))
    assert bounds.merged(old, [added]) == [*old, added]
    for name in bounds.HEADS:
        of_table = [row for row in old if row[0] == name]
        assert sorted(of_table[::-1], key=bounds._order) == of_table
