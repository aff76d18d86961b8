"""Compile the Triton kernels for GPUs that need not be there, and report what they use.

Prints one JSON object a kernel, or with ``--table`` the Markdown of a README. The launches are the
ops' own: a recorder stands in for the launcher, so shapes, dtypes and configurations are the real
ones and are written down nowhere twice.

    python tests/kernels/compiled_triton.py --table model_spans model_whole
"""

import argparse
import contextlib
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from ssmzoo_kernels.causal_conv1d import triton as conv_triton
from ssmzoo_kernels.declaration import declared

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")
# what a record counts in NVIDIA's assembly: products from shared memory, those from registers, and
# asynchronous copies
PTX = {"wgmma": r"wgmma\.mma_async", "mma": r"mma\.sync", "copies": r"cp\.async\.c[ag]"}
# compute capabilities of NVIDIA, names of AMD's architectures
TARGETS = (80, 90)
OTHER_TARGETS = (86, 89, 120, "gfx942")

# name: (op, dtype of activations, channels, states or taps, tokens, segments); for selective_scan,
# the discretization stands for the op
CASES = {
    "model_spans": ("longhorn_scan", torch.bfloat16, 1536, 16, 2048, 1),
    "model_whole": ("longhorn_scan", torch.bfloat16, 1536, 16, 65536, 64),
    "decode": ("longhorn_scan", torch.bfloat16, 1536, 16, 64, 64),
    "float32_spans": ("longhorn_scan", torch.float32, 1536, 16, 2048, 1),
    "float32_whole": ("longhorn_scan", torch.float32, 1536, 16, 65536, 64),
    "float64_spans": ("longhorn_scan", torch.float64, 1536, 16, 2048, 1),
    "large_spans": ("longhorn_scan", torch.bfloat16, 4096, 16, 2048, 1),
    "ragged16_spans": ("longhorn_scan", torch.bfloat16, 1537, 16, 2048, 1),
    "states32_spans": ("longhorn_scan", torch.bfloat16, 1536, 32, 2048, 1),
    "ragged_spans": ("longhorn_scan", torch.bfloat16, 1537, 3, 2048, 1),
    "states1_spans": ("longhorn_scan", torch.bfloat16, 1536, 1, 2048, 1),
    "states64_spans": ("longhorn_scan", torch.bfloat16, 1536, 64, 2048, 1),
    "states128_spans": ("longhorn_scan", torch.bfloat16, 1536, 128, 2048, 1),
    "states256_spans": ("longhorn_scan", torch.bfloat16, 768, 256, 2048, 1),
    "selective_spans": ("euler", torch.bfloat16, 1536, 16, 2048, 1),
    "selective_whole": ("euler", torch.bfloat16, 1536, 16, 65536, 64),
    "selective_decode": ("euler", torch.bfloat16, 1536, 16, 64, 64),
    "selective_float32_spans": ("euler", torch.float32, 1536, 16, 2048, 1),
    "selective_float64_spans": ("euler", torch.float64, 1536, 16, 2048, 1),
    "selective_ragged_spans": ("euler", torch.bfloat16, 1537, 3, 2048, 1),
    "selective_states1_spans": ("euler", torch.bfloat16, 1536, 1, 2048, 1),
    "selective_states64_spans": ("euler", torch.bfloat16, 1536, 64, 2048, 1),
    "selective_states128_spans": ("euler", torch.bfloat16, 1536, 128, 2048, 1),
    "selective_large_spans": ("euler", torch.bfloat16, 4096, 16, 2048, 1),
    "zoh_spans": ("zoh", torch.bfloat16, 1536, 16, 2048, 1),
    "zoh_whole": ("zoh", torch.bfloat16, 1536, 16, 65536, 64),
    "zoh_float32_spans": ("zoh", torch.float32, 1536, 16, 2048, 1),
    "zoh_float64_spans": ("zoh", torch.float64, 1536, 16, 2048, 1),
    "zoh_narrow_spans": ("zoh", torch.float32, 16, 8, 2048, 1),
    "zoh_states1_spans": ("zoh", torch.float32, 16, 1, 2048, 1),
    "zoh_states64_spans": ("zoh", torch.bfloat16, 1536, 64, 2048, 1),
    "zoh_large_spans": ("zoh", torch.bfloat16, 4096, 16, 2048, 1),
    "conv": ("causal_conv1d", torch.bfloat16, 1536, 4, 2048, 1),
    "conv_float32": ("causal_conv1d", torch.float32, 1536, 4, 2048, 1),
    "conv_ragged": ("causal_conv1d", torch.bfloat16, 1537, 3, 2048, 1),
}


@contextlib.contextmanager
def recording():
    """Give a list that collects the launches inside: kernel, positional and named arguments."""
    seen = []
    original = JITFunction.run
    JITFunction.run = lambda self, *args, grid, warmup, **named: seen.append((self, args, named))
    try:
        yield seen
    finally:
        JITFunction.run = original


def launches(case):
    """Return the launches of one forward and backward: kernel, positional and named arguments."""
    op, dtype, width, size, tokens, segments = CASES[case]
    offsets = torch.zeros(segments + 1, dtype=torch.int64)

    def empty(*shape):
        return torch.empty(shape, dtype=dtype)

    with recording() as seen:
        if op == "causal_conv1d":
            inputs = (empty(tokens, width), empty(width, size), empty(width))
            inputs = (*inputs, empty(segments, size - 1, width))
            out, final = conv_triton.forward(*inputs, offsets, True)
            conv_triton.backward(out, final, *inputs, offsets, True)
        else:
            rows, keys = empty(tokens, width), empty(tokens, size)
            vector, start = torch.empty(width), torch.empty(segments, width, size)
            family, inputs, choice = "longhorn_scan", (rows, keys, keys, rows, vector, vector), ()
            if op != "longhorn_scan":
                family, choice = "selective_scan", (op,)
                inputs = (rows, rows, torch.empty(width, size), keys, keys, vector, rows, vector)
            else:
                inputs = (*inputs, rows)
            kernels = declared()[family].kernels("triton")
            train = not case.endswith("decode")
            out, final, saved = kernels.forward(*inputs, start, offsets, train, *choice)
            if train:
                kernels.backward(out, final, *inputs, start, offsets, saved, *choice)
    return seen


def compile_launch(kernel, args, named, target):
    """Compile a recorded launch as the launcher would; ``target``: what ``TARGETS`` has."""
    values = dict(zip(kernel.arg_names, args, strict=False)) | named
    options = {name: values.pop(name) for name in OPTIONS if name in values}
    gpu = GPUTarget("cuda", target, 32)
    if isinstance(target, str):
        gpu = GPUTarget("hip", target, 64)
        options.pop("maxnreg", None)  # as ``every_register`` does there
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        name, value = parameter.name, values[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=gpu, options=options), options


def usage(compiled):
    """Return registers a thread, and bytes of stack and local memory, from the machine code."""
    if "amdgcn" in compiled.asm:
        text = compiled.asm["amdgcn"]
        registers, spilled = (
            int(re.search(rf"\.{name}:\s+(\d+)", text)[1])
            for name in ("vgpr_count", "private_segment_fixed_size")
        )
        return {"registers": registers, "stack": spilled, "local": 0}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [TOOLS / "cuobjdump", "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    return dict(zip(("registers", "stack", "local"), map(int, found.groups()), strict=True))


def layouts(compiled, named):
    """Return how a scan's states lie: entries a lane side by side, and lanes, by axis."""
    shape = "x".join(str(named[x]) for x in ("BLOCK_N", "BLOCK_D") if x in named)
    text = compiled.asm["ttgir"]
    names = set(re.findall(rf"tensor<{shape}xf(?:32|64), (#\w+)>", text))
    form = r"(#\w+) = #ttg\.blocked<\{sizePerThread = (\[.*?\]), threadsPerWarp = (\[.*?\])"
    return [
        [json.loads(x) for x in found] for name, *found in re.findall(form, text) if name in names
    ]


def report(case, target):
    """Compile every kernel of a case; one record a kernel, however often it is launched."""
    found = {
        kernel.__name__ + ("[reverse]" if named.get("REVERSE") else ""): (kernel, args, named)
        for kernel, args, named in launches(case)
    }
    for name, launch in found.items():
        yield record_of(case, name, launch, target)


def cpu_seconds():
    """Return what this process and its children, such as ptxas, have computed: no waiting."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def record_of(case, name, launch, target):
    """Compile a launch; return what it is and what it uses."""
    begun = cpu_seconds()
    compiled, options = compile_launch(*launch, target)
    spent = cpu_seconds() - begun
    return {
        "case": case,
        "kernel": name,
        "target": target if isinstance(target, str) else f"sm_{target}",
        "warps": options["num_warps"],
        **usage(compiled),
        "shared": compiled.metadata.shared,
        **{x: len(re.findall(form, compiled.asm.get("ptx", ""))) for x, form in PTX.items()},
        "seconds": round(spent, 2),
        "layouts": layouts(compiled, launch[2]),
    }


def write_records(cases, launches, prefix="", targets=TARGETS):
    """Write a record of every launch of some cases; for the scripts beside this one.

    They need no road here: a script's folder is where it imports from.
    """
    for case in cases:
        for target in targets:
            for launch in launches(case):
                name = launch[0].__name__.removeprefix(prefix)
                write(json.dumps(record_of(case, name, launch, target)))


def named_target(text):
    return int(text) if text.isdigit() else text


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="+", choices=CASES, metavar="case")
    parser.add_argument("--targets", nargs="+", type=named_target, default=TARGETS)
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    columns = ("case", "kernel", "target", "warps", "registers", "stack", "local", "shared")
    if arguments.table:
        write("| " + " | ".join(columns) + " |")
        write("|" + " --- |" * len(columns))
    for case in arguments.cases:
        for target in arguments.targets:
            for record in report(case, target):
                if arguments.table:
                    write("| " + " | ".join(str(record[c]) for c in columns) + " |")
                else:
                    write(json.dumps(record))


def write(line):
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
