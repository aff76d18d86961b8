"""Predict cycles a token of the Triton kernels' loops, from machine code, without a GPU.

A model, not a measurement: one quarter of a Hopper SM runs a few equal warps through a loop of the
SASS. A warp issues in order, one instruction a cycle for all warps together, once its operands are
there and the unit is free; ``LATENCY`` and ``OCCUPIED`` say when that is. It has no caches (every
load from global memory takes as long as from DRAM) and no bandwidth, and asynchronous instructions
(HGMMA, copies to shared memory) cost it their issue alone. Compare two versions of a kernel by it,
not a kernel with a clock.

    python tests/kernels/scoreboard.py                    # the rows of scoreboard.csv
    python tests/kernels/scoreboard.py --sass FILE        # the loops of what nvdisasm -c printed
"""

import argparse
import csv
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

WARPS = 2  # of a quarter; 8 an SM, which is what 255 registers a thread allow
TARGET = 90
TABLE = Path(__file__).with_suffix(".csv")
COLUMNS = (
    *("group", "case", "kernel", "channels", "cycles", "round_trips"),
    *("SHFL", "BAR", "MUFU", "registers", "spilled"),
)

# what the table has: group, case, kernel, and the constants of the kernel that say how many tokens
# a pass of its loops takes (a number; or None: the whole kernel counts, once through, and "a token"
# means a program) and how many channels a program has
ROWS = [
    *(
        ("scans", case, f"scan_{kernel}_kernel", "TOKENS", "BLOCK_D")
        for case in ("large_spans", "selective_large_spans", "zoh_large_spans")
        for kernel in ("fwd_carry", "fwd", "bwd_carry", "bwd")
    ),
    *(
        ("linear", case, f"linear_{kernel}_kernel", "TOKENS", "BLOCK_D")
        for case in ("model", "complex")
        for kernel in ("carry", "scan_fwd", "scan_bwd")
    ),
    ("feedback", "model", "feedback_fwd_kernel", "TOKENS", "BLOCK_D"),
    ("feedback", "model", "feedback_bwd_kernel", "TOKENS", "BLOCK_D"),
    ("feedback", "model", "feedback_newton_kernel", "BLOCK_L", "BLOCK_D"),
    # of eidetic_attention, tokens that those of a program meet
    ("eidetic", "model128", "eidetic_attention_fwd_kernel", "BLOCK_N", "BLOCK_D"),
    ("eidetic", "model128", "eidetic_attention_bwd_query_kernel", "BLOCK_N", "BLOCK_D"),
    ("eidetic", "model128", "eidetic_attention_bwd_band_kernel", "BLOCK_M", "BLOCK_D"),
    ("eidetic", "model128", "eidetic_attention_bwd_memory_kernel", "BLOCK_M", "BLOCK_D"),
    ("eidetic", "wide", "eidetic_attention_bwd_band_kernel", "BLOCK_M", "BLOCK_D"),
    ("eidetic", "wide", "eidetic_attention_bwd_memory_kernel", "BLOCK_M", "BLOCK_D"),
    ("linear_attention", "gated_delta", "pairs_kernel", None, "BLOCK_K"),
    ("linear_attention", "gated_delta", "march_kernel", "C", "BLOCK_V"),
    ("linear_attention", "gated_delta", "march_back_kernel", "C", "BLOCK_V"),
    ("linear_attention", "gated_delta", "gradients_kernel", None, "BLOCK_V"),
    ("linear_attention", "gated_delta", "step_kernel", None, "BLOCK_V"),
    *(
        ("rms_norm", case, f"rms_norm_{kernel}_kernel", None, "BLOCK_D")
        for case in ("model", "sum")
        for kernel in ("fwd", "bwd", "weight")
    ),
    ("scans", "conv", "causal_conv1d_fwd_kernel", 1, "BLOCK_D"),
    ("scans", "conv", "causal_conv1d_bwd_kernel", 1, "BLOCK_D"),
]

# cycles until a result is there; 5 where nothing is said
DRAM = 550
LATENCY = {
    **dict.fromkeys(("LDG", "LDL", "ATOMG"), DRAM),
    **dict.fromkeys(("LDS", "LDC"), 30),
    **dict.fromkeys(("LDSM", "HMMA", "DMMA"), 33),
    **dict.fromkeys(("UIADD3", "ULEA", "USHF", "UISETP", "USEL", "UMOV", "ULDC"), 8),
    **{"SHFL": 24, "S2R": 25, "MUFU": 22, "R2UR": 10, "I2F": 14, "F2I": 14},
}
# cycles for which the warp that issued it issues nothing else; 1 where nothing is said
HELD = {"BAR": 18, "WARPSYNC": 18, "BRA": 8}
# the unit that executes it, and for how many cycles it is busy with a warp
_ALU = (
    *("IADD3", "LOP3", "SHF", "PRMT", "ISETP", "FSETP", "SEL", "FSEL", "LEA", "MOV", "FMNMX"),
    *("IMNMX", "PLOP3", "F2FP", "VIADD", "VIMNMX", "IABS", "P2R"),
)
OCCUPIED = {
    **dict.fromkeys(_ALU, ("alu", 2)),
    **dict.fromkeys(("FFMA", "FMUL", "FADD", "HFMA2"), ("fma", 1)),
    **dict.fromkeys(("SHFL", "LDS", "STS", "LDG", "STG"), ("memory", 4)),
    **dict.fromkeys(("LDSM", "STSM"), ("memory", 8)),
    **dict.fromkeys(("MUFU", "I2F", "F2I"), ("special", 8)),
    **dict.fromkeys(("DADD", "DMUL", "DFMA"), ("double", 2)),
    **{"IMAD": ("integer", 2), "BAR": ("memory", 1), "HMMA": ("tensor", 16)},
}
ARITHMETIC = ("FFMA", "FMUL", "FADD", "DADD", "DMUL", "DFMA", "HMMA", "DMMA", "HGMMA")
_WRITES_NOTHING = ("STG", "STS", "STSM", "STL", "BRA", "BAR", "NOP", "EXIT", "WARPSYNC", "DEPBAR")
_SECOND_IS_PREDICATE = (
    *("ISETP", "FSETP", "DSETP", "IADD3", "UIADD3", "LEA", "UISETP", "PLOP3", "UPLOP3"),
    *("IMAD", "SHFL", "LOP3", "ULOP3"),
)
_OPERANDS = re.compile(r",(?![^\[]*\])")
_REGISTER = re.compile(r"\b(U?R)(\d+)\b(\.64)?")
_PREDICATE = re.compile(r"\bU?P[0-6]\b")


class Instruction(NamedTuple):
    """One instruction: its mnemonic without modifiers, and the registers that it names."""

    base: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


def _registers(operand: str, count: int) -> list[str]:
    return [
        f"{file}{int(first) + i}"
        for file, first, pair in _REGISTER.findall(operand)
        for i in range(max(count, 2 if pair else 1))
    ]


def _instruction(guard: str | None, name: str, operands: str) -> Instruction:
    base, *modifiers = name.split(".")
    size = 4 if "128" in modifiers or "4" in modifiers else 2 if {"64", "2"} & {*modifiers} else 1
    moves = base in ("LDG", "LDS", "LDC", "ULDC", "LDL", "LDSM", "STG", "STS", "STL", "STSM")
    width = size if moves else 2 if base == "CS2R" and "32" not in modifiers else 1
    wide = base in ("IMAD", "UIMAD") and "WIDE" in modifiers
    reads = _PREDICATE.findall(guard or "")
    writes = []
    parts = [x.strip() for x in _OPERANDS.split(operands)]
    for i, part in enumerate(parts):
        first = i == 0 or (i == 1 and base in _SECOND_IS_PREDICATE and _PREDICATE.fullmatch(part))
        if "[" in part:  # an address: a descriptor in uniform registers is a pair
            for x in _REGISTER.finditer(part):
                reads += _registers(x.group(), 2 if x.group(1) == "UR" else 1)
        elif first and base not in _WRITES_NOTHING:
            writes += _PREDICATE.findall(part) + _registers(part, 2 if wide else width)
        else:
            stored = width if base in ("STG", "STS", "STL", "STSM") else 1
            added = 2 if wide and i == len(parts) - 1 else 1
            reads += _PREDICATE.findall(part) + _registers(part, max(stored, added))
    return Instruction(base, tuple(reads), tuple(writes))


def parsed(sass: str) -> tuple[list[tuple[Instruction, str | None]], dict[str, int]]:
    """Return the code of ``nvdisasm -c``, with the label a branch goes to, and where labels are."""
    code: list[tuple[Instruction, str | None]] = []
    labels = {}
    for line in sass.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif found := re.match(
            r"\s+/\*[0-9a-f]{4,}\*/\s+(?:(@\S+)\s+)?([A-Z0-9_.]+)\s*(.*?)\s*;", line
        ):
            to = re.search(r"\.L_x_\d+", found[3]) if found[2].startswith("BRA") else None
            code.append((_instruction(found[1], found[2], found[3]), to and to.group()))
    return code, labels


def innermost_loops(sass: str) -> list[list[Instruction]]:
    """Return the loops of ``nvdisasm -c`` that hold no other loop, in their order."""
    code, labels = parsed(sass)
    spans = [
        (labels[to], i)
        for i, (_, to) in enumerate(code)
        if to in labels and labels[to] < i  # one that branches to itself ends every kernel
    ]
    return [
        [instruction for instruction, _ in code[first : last + 1]]
        for first, last in spans
        if not any(first <= a and b <= last and (a, b) != (first, last) for a, b in spans)
    ]


def loops_of_tokens(sass: str) -> list[list[Instruction]]:
    """Return the innermost loops that compute: what searches or copies does not count."""
    return [
        loop
        for loop in innermost_loops(sass)
        if sum(x.base in ARITHMETIC for x in loop) >= 8
        and any(x.base in ("LDG", "LDGSTS", "LDS", "LDSM") for x in loop)
    ]


class Prediction(NamedTuple):
    """What a pass of a loop takes."""

    cycles: float
    round_trips: float  # how often a warp waits for a load for half of what DRAM takes, or longer


def predict(loop: list[Instruction], warps: int = WARPS, passes: int = 6) -> Prediction:
    """Run equal warps through a loop; the first half of the passes does not count."""
    ready: list[dict[str, tuple[int, bool]]] = [{} for _ in range(warps)]  # and whether by a load
    at, done, free, waited = [0] * warps, [0] * warps, [0] * warps, [0] * warps
    unit_free: dict[str, int] = {}
    ends: list[list[int]] = [[] for _ in range(warps)]
    now = turn = 0
    while any(x < passes for x in done):
        times = []
        for w in (*range(turn, warps), *range(turn)):
            if done[w] == passes:
                continue
            x = loop[at[w]]
            known = ready[w]
            operands = [known[r] for r in (*x.reads, *x.writes) if r in known]
            arrival, loaded = max(operands, default=(0, False))
            unit, busy = OCCUPIED.get(x.base, (x.base, 1))
            start = max(arrival, free[w], unit_free.get(unit, 0))
            if start > now:
                times.append(start)
                continue
            if loaded and arrival - free[w] >= DRAM / 2 and done[w] >= passes // 2:
                waited[w] += 1
            unit_free[unit] = now + busy
            for r in x.writes:
                known[r] = now + LATENCY.get(x.base, 5), x.base == "LDG"
            free[w] = now + HELD.get(x.base, 1)
            at[w] += 1
            if at[w] == len(loop):
                at[w], done[w] = 0, done[w] + 1
                ends[w].append(now)
            turn = (w + 1) % warps
            now += 1
            break
        else:
            now = min(times)
    counted = passes - passes // 2
    first, last = (max(x[i] for x in ends) for i in (passes // 2 - 1, passes - 1))
    return Prediction((last - first) / counted, max(waited) / counted)


def disassembled(cubin: bytes) -> str:
    """Return a kernel's machine code as ``nvdisasm`` writes it."""
    from compiled import TOOLS

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [TOOLS / "nvdisasm", "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def per_token(sass: str, tokens: int | None, warps: int = WARPS) -> dict[str, float]:
    """Return what all loops of a kernel take together, a token and warp.

    Args:
        sass: What ``nvdisasm -c`` printed.
        tokens: How many a pass of a loop takes; None: the whole kernel is one pass.
        warps: How many share a quarter of an SM.
    """
    loops = loops_of_tokens(sass)
    if tokens is None:
        loops, tokens = [[x for x, _ in parsed(sass)[0] if x.base != "NOP"]], 1
    found = [predict(loop, warps) for loop in loops]
    bases = [x.base for loop in loops for x in loop]
    sums = {"cycles": sum(x.cycles for x in found), "round_trips": sum(x[1] for x in found)}
    sums |= {kind: bases.count(kind) for kind in ("SHFL", "BAR", "MUFU")}
    return {name: round(x / tokens, 2) for name, x in sums.items()}


def records(rows=ROWS, target: int = TARGET):
    """Compile kernels and yield a row of the table for each."""
    from compiled import compile_launch, launches, usage

    for group, case, kernel, tokens, channels in rows:
        launch = next(x for _, x in launches(f"{group}:{case}") if x[0].__name__ == kernel)
        values = dict(zip(launch[0].arg_names, launch[1], strict=False)) | launch[2]
        compiled, _ = compile_launch(*launch, target)
        used = usage(compiled)
        yield {
            "group": group,
            "case": case,
            "kernel": kernel,
            "channels": values[channels],
            **per_token(disassembled(compiled.asm["cubin"]), values.get(tokens, tokens)),
            "registers": used["registers"],
            "spilled": used["stack"] + used["local"],
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sass", type=Path, help="print the loops of this file instead")
    parser.add_argument("--warps", type=int, default=WARPS)
    arguments = parser.parse_args()
    if arguments.sass:
        for loop in innermost_loops(arguments.sass.read_text()):
            bases = [x.base for x in loop]
            most = sorted({*bases}, key=bases.count, reverse=True)[:14]
            found = predict(loop, arguments.warps)
            counts = " ".join(f"{x} {bases.count(x)}" for x in most)
            sys.stdout.write(
                f"{len(loop)} instructions, {found.cycles:.0f} cycles, "
                f"{found.round_trips:.1f} round trips: {counts}\n"
            )
        return
    writer = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for record in records():
        writer.writerow(record)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
