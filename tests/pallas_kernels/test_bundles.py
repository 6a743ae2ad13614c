"""Bundles are counted by regions of a schedule, and a kernel that has more than the table says is reported."""

from __future__ import annotations

import pytest

from tests.pallas_kernels import bundles

SCHEDULE = """\
     0   :  { %s1 = smov 0 }
   0x1 LB: > { %v1 = vmatmul.bf16.gmra.mxu0 %v0  ;;  %v2 = vpop.f32.mrf.mxu0 }
   0x2   : > { %v3 = vpow2.f32 %v2  ;;  %v4 = vadd.f32 %v2, %v3 }
   0x3   : > { vst [vmem:[#allocation9_spill]] %v4  ;;  vst [vmem:[%s2]] %v3 }
   0x4 LB: > { %s3 = sadd.s32 1, %s1 }
   0x5   :  { %s4 = sadd.s32 1, %s1 }
"""


def test_a_region_with_products_is_counted_and_others_are_not():
    counted = {"bundles": 3, "results": 1, "exps": 1, "arithmetic": 1, "stores": 2, "spills": 1}
    assert bundles.steps(SCHEDULE) == [counted]


@pytest.mark.parametrize("more,code", [(1.0, 0), (1.04, 0), (1.06, 1), (0.5, 0)])
def test_a_kernel_with_five_percent_more_bundles_is_reported(more, code, monkeypatch, tmp_path, capsys):
    regions = [{"bundles": 1000, "results": 1, "exps": 1, "arithmetic": 1, "stores": 2, "spills": 1}]
    grown = [{**regions[0], "bundles": int(1000 * more)}]

    table = tmp_path / "BOUNDS.md"
    table.write_text("# head\n" + "\n".join(bundles.row("forward", chip, regions) for chip in bundles.TPUS))
    monkeypatch.setattr(bundles, "TABLE", table)
    monkeypatch.setattr(bundles, "rows", lambda chip: iter([bundles.row("forward", chip, grown)]))
    assert bundles.main(["--check"]) == code
    assert f"1,000 -> {int(1000 * more):6,}" in capsys.readouterr().out
