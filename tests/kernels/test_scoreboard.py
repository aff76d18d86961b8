"""The predicted cycles a token of the Triton kernels, and the model that predicts them."""

import csv
import io

import pytest
from tests.kernels.scoreboard import DRAM, TABLE, innermost_loops, per_token, predict
from tests.kernels.triton_processes import HERE, run

# a load that the instruction behind it waits for, within a loop that holds another one
LOOPS = """
.L_x_0:
        /*0000*/                   MOV R4, R5 ;
.L_x_1:
        /*0010*/              @!P0 LDG.E.64 R2, desc[UR4][R8.64+0x10] ;
        /*0020*/                   FFMA R6, R3, R6, R7 ;
        /*0030*/               @P1 BRA `(.L_x_1) ;
        /*0040*/               @P2 BRA `(.L_x_0) ;
.L_x_2:
        /*0050*/                   BRA `(.L_x_2);
"""


def test_a_loop_that_waits_for_its_load_takes_as_long_as_the_load():
    (loop,) = innermost_loops(LOOPS)
    assert [x.base for x in loop] == ["LDG", "FFMA", "BRA"]
    assert loop[0].reads == ("P0", "UR4", "UR5", "R8", "R9")
    assert loop[0].writes == ("R2", "R3")
    assert predict(loop, warps=1) == (DRAM + 1 + 8, 1)
    # the sum that it goes into is ready when the next load is
    assert predict(loop, warps=2).cycles < DRAM + 20


def test_what_is_outside_of_loops_counts_where_a_kernel_is_one_pass():
    kernel = LOOPS + "        /*0060*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;\n"
    assert per_token(kernel, 1)["BAR"] == 0
    assert per_token(kernel, None)["BAR"] == 1
    assert per_token(kernel, None)["cycles"] > per_token(LOOPS, None)["cycles"] > DRAM


def read(text):
    found = {}
    for row in csv.DictReader(io.StringIO(text)):
        key = tuple(row.pop(name) for name in ("group", "case", "kernel"))
        found[key] = {name: float(x) for name, x in row.items()}
    return found


def worse(now, committed):
    """Return what a kernel takes more of than the committed table allows."""
    slack = {"cycles": 1.1}
    bounded = ("cycles", "round_trips", "SHFL", "BAR", "MUFU", "spilled")
    return [x for x in bounded if now[x] > committed[x] * slack.get(x, 1)]


@pytest.mark.long
def test_kernels_take_no_more_than_the_committed_table_says():
    pytest.importorskip("triton", reason="triton is not installed")
    committed = read(TABLE.read_text())
    now = read(run([str(HERE / "scoreboard.py")]))
    assert now.keys() == committed.keys()
    assert not {key: x for key in now if (x := worse(now[key], committed[key]))}


def test_the_table_notices_a_tenth_more_cycles_and_one_barrier():
    row = {"cycles": 400, "round_trips": 0, "SHFL": 4, "BAR": 0, "MUFU": 4, "spilled": 0}
    assert worse(row, row) == worse(row | {"cycles": 440}, row) == []
    assert worse(row | {"cycles": 441, "BAR": 1}, row) == ["cycles", "BAR"]
