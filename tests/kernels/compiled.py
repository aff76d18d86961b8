"""Compile the Triton kernels for GPUs that need not be there, and report what they use.

Prints one JSON object a case, kernel and target, or with ``--table`` the Markdown of a README. The
launches are the ops' own: a recorder stands in for the launcher, so shapes, dtypes and
configurations are the real ones and are written down nowhere twice.

    python tests/kernels/compiled.py --table scans:model_spans scans:model_whole
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
from unittest import mock

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from ssmzoo_kernels.add_rms_norm import triton as sum_triton
from ssmzoo_kernels.causal_conv1d import triton as conv_triton
from ssmzoo_kernels.companion_step import triton as companion_triton
from ssmzoo_kernels.declaration import declared
from ssmzoo_kernels.diagonal_step import triton as step_triton
from ssmzoo_kernels.eidetic_attention import triton as eidetic_triton
from ssmzoo_kernels.eidetic_attention.arguments import Call, Tensors
from ssmzoo_kernels.feedback_scan import triton as feedback_triton
from ssmzoo_kernels.feedback_scan.inputs import Inputs, Stop
from ssmzoo_kernels.gated_linear_attention import triton as matrix_triton
from ssmzoo_kernels.innovation import triton as innovation_triton
from ssmzoo_kernels.linear_scan import triton as linear_triton
from ssmzoo_kernels.rms_norm import triton as norm_triton
from ssmzoo_kernels.vandermonde import triton as vandermonde_triton
from ssmzoo_kernels.vandermonde.tables import Lags

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


# --- scans ---------------------------------------------------------------------------------------

# name: (op, dtype of activations, channels, states or taps, tokens, segments); for selective_scan,
# the discretization stands for the op
SCANS = {
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


def scans(case):
    """Return the launches of one forward and backward: kernel, positional and named arguments."""
    op, dtype, width, size, tokens, segments = SCANS[case]
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


# --- linear --------------------------------------------------------------------------------------

# name: (columns, dtype, tokens): 2048 tokens are cut into spans, 8 are not
LINEAR = {
    "model": (1536, torch.float32, 2048),
    "whole": (1536, torch.float32, 8),
    "bfloat16": (1536, torch.bfloat16, 2048),
    "narrow": (3, torch.float32, 2048),
    "float64": (77, torch.float64, 2048),
    "complex": (1536, torch.complex64, 2048),
}


def linear(case):
    width, dtype, tokens = LINEAR[case]
    rows, edges = torch.empty(tokens, width, dtype=dtype), torch.empty(2, width, dtype=dtype)
    offsets = torch.zeros(3, dtype=torch.int64)
    with recording() as seen:
        h, final = linear_triton.forward(rows, rows, edges, offsets)
        linear_triton.backward(rows, final, rows, h, edges, offsets)
    return seen


# --- feedback ------------------------------------------------------------------------------------

# name: (channels, states, segments, dtype, whether all optional inputs are there, and drive)
FEEDBACK = {
    "model": (2048, 16, 64, torch.bfloat16, True, False),
    "small": (256, 16, 1, torch.float32, True, False),
    "plain": (2048, 16, 64, torch.float32, False, False),
    "drive": (2048, 16, 64, torch.float32, True, True),
    "states1": (37, 1, 8, torch.float32, True, False),
    "states100": (96, 100, 8, torch.float32, True, False),
    "states256": (96, 256, 8, torch.float32, True, False),
    "float64": (2048, 16, 64, torch.float64, True, False),
}


def feedback(case):
    width, states, segments, dtype, full, driven = FEEDBACK[case]
    exact = torch.promote_types(torch.float32, dtype)
    rows = torch.empty(8, width, dtype=dtype)
    matrix, vector = torch.empty(width, states, dtype=exact), torch.empty(width, dtype=exact)
    edges = torch.empty(segments, width, states, dtype=exact)
    offsets = torch.zeros(segments + 1, dtype=torch.int64)
    optional = (matrix, vector) if full else (None, None)
    inputs = (rows, matrix, matrix, matrix, *optional, rows if driven else None)
    inputs = Inputs(*inputs, edges if full else None)
    with recording() as seen:
        out, final, saved = feedback_triton.forward(inputs, offsets, True)
        feedback_triton.backward(out, final, inputs, offsets, saved)
        # nothing runs, so nothing converges
        with contextlib.suppress(feedback_triton.NotConverged):
            feedback_triton.newton(inputs, offsets, True, Stop(1e-6, None, 0.0))
    return seen


# --- linear_attention ----------------------------------------------------------------------------

# name: (dtype, groups, heads, width of keys, width of values, rows of a decay, rule)
LINEAR_ATTENTION = {
    "ssd": (torch.bfloat16, 1, 24, 128, 64, 1, "additive"),
    "gla": (torch.bfloat16, 4, 4, 128, 128, 128, "additive"),
    "gated_delta": (torch.bfloat16, 16, 32, 128, 128, 1, "delta"),
    "kda": (torch.bfloat16, 32, 32, 128, 128, 128, "delta"),
    "narrow": (torch.bfloat16, 8, 8, 64, 64, 1, "delta"),
    "narrow_rows": (torch.bfloat16, 8, 8, 64, 64, 64, "delta"),
    "odd": (torch.bfloat16, 2, 4, 37, 50, 1, "delta"),
    "wide": (torch.bfloat16, 4, 4, 256, 512, 1, "additive"),
    "float32": (torch.float32, 8, 8, 64, 64, 1, "delta"),
    "float32_rows": (torch.float32, 8, 8, 64, 64, 64, "delta"),
    "float64": (torch.float64, 4, 4, 64, 64, 1, "delta"),
}


def linear_attention(case):
    dtype, groups, heads, keys, width, rows, rule = LINEAR_ATTENTION[case]
    tokens, sequences = 4096, 2
    q = torch.empty(tokens, groups, keys, dtype=dtype)
    v = torch.empty(tokens, heads, width, dtype=dtype)
    decay, beta = torch.empty(tokens, heads, rows), torch.empty(tokens, heads, dtype=dtype)
    exact = torch.promote_types(dtype, torch.float32)
    state = torch.empty(sequences, heads, keys, width, dtype=exact)
    offsets = torch.zeros(sequences + 1, dtype=torch.int64)
    with recording() as seen:
        inputs, options = (q, q, v, decay, beta, state), (rule, 1.0, 64)
        out, final, saved = matrix_triton.forward(*inputs, offsets, True, *options)
        matrix_triton.backward(out, final, *inputs, offsets, saved, *options)
        inputs = [x[:sequences] for x in inputs]
        matrix_triton.forward(*inputs, offsets, False, *options)
    return seen


# --- eidetic -------------------------------------------------------------------------------------

# name: (dtype, width of a head, heads, heads of keys, window, memory's rows, past);
# "decode": one token a sequence
EIDETIC = {
    "model64": (torch.bfloat16, 64, 12, 12, 512, 64, False),
    "model128": (torch.bfloat16, 128, 16, 4, 512, 64, False),
    "carried": (torch.bfloat16, 64, 12, 12, 512, 64, True),
    "carried128": (torch.float16, 128, 16, 16, 512, 64, True),
    "decode": (torch.bfloat16, 128, 16, 4, 512, 64, True),
    "float32": (torch.float32, 64, 12, 12, 512, 64, True),
    "float32_128": (torch.float32, 128, 16, 16, 512, 64, False),
    "float64": (torch.float64, 64, 4, 4, 512, 64, True),
    "float64_128": (torch.float64, 128, 4, 4, 512, 64, False),
    "wide": (torch.bfloat16, 256, 4, 4, 512, 64, True),
    "plain": (torch.bfloat16, 96, 16, 16, None, 0, True),
    "narrow": (torch.bfloat16, 16, 4, 2, 128, 32, True),
    "decode64": (torch.bfloat16, 64, 12, 12, 512, 64, True),
    "decode_float32": (torch.float32, 64, 12, 12, 512, 64, True),
    "decode_wide": (torch.bfloat16, 256, 4, 4, 512, 64, True),
    "decode_float64": (torch.float64, 128, 4, 4, 512, 64, True),
}


def eidetic(case, target=90):
    dtype, width, heads, groups, window, rows, past = EIDETIC[case]
    decodes = case.startswith("decode")
    sequences, tokens = 2, 2 if decodes else 4096

    def empty(*shape):
        return torch.empty(*shape, groups, width, dtype=dtype)

    def pair(present, *shape):
        return [empty(*shape) if present else None for _ in range(2)]

    tensors = Tensors(
        torch.empty(tokens, heads, width, dtype=dtype),
        *pair(True, tokens),
        *pair(rows, 10, rows),
        *pair(past, sequences, 600),
        *[None] * 4,
    )
    count = torch.zeros(10, dtype=torch.int64) if rows else None
    positions = torch.zeros(10, rows, dtype=torch.int64) if case == "carried" else None
    offsets, seen = (torch.zeros(x, dtype=torch.int64) for x in (sequences + 1, sequences))
    call = Call(count, positions, offsets, seen, window, 0, width**-0.5)
    shaped_for = "hip" if isinstance(target, str) else "sm_90" if target == 90 else "sm_80"
    shaping = mock.patch.object(eidetic_triton, "target_of", return_value=shaped_for)
    with shaping, recording() as recorded:
        out, lse = eidetic_triton.forward(tensors, call)
        if not decodes:
            eidetic_triton.backward(out, out, lse, tensors, call)
    return recorded


# --- diagonal ------------------------------------------------------------------------------------

# name: (op, dtype, heads, modes, length or batch)
DIAGONAL = {
    "vandermonde": ("vandermonde", torch.complex64, 256, 64, 16384),
    "vandermonde_ragged": ("vandermonde", torch.complex64, 5, 100, 1000),
    "step": ("diagonal_step", torch.complex64, 768, 64, 8),
    "step_ragged": ("diagonal_step", torch.complex64, 5, 100, 3),
    "step_float64": ("diagonal_step", torch.complex128, 768, 64, 8),
}


def diagonal(case):
    op, dtype, heads, modes, size = DIAGONAL[case]
    with recording() as seen:
        coefficients = torch.ones(heads, modes, dtype=dtype)
        if op == "vandermonde":
            lags = Lags(size, 0, 0, torch.ones(heads, modes, dtype=torch.bool))
            exponent = -coefficients.to(torch.complex128)
            grad = vandermonde_triton.synthesize(coefficients[None], exponent, lags)
            vandermonde_triton.analyze(grad, exponent, lags, True)
            vandermonde_triton.analyze(grad, exponent, lags, False)
        else:
            u = torch.ones(size, heads, dtype=dtype.to_real())
            state = torch.ones(size, heads, modes, dtype=dtype)
            step_triton.forward(u, state, coefficients, coefficients, coefficients, u[0])
    return seen


# --- innovation ----------------------------------------------------------------------------------

# name: (channels, span, relative, dtype)
INNOVATION = {
    "model": (2048, 4, False, torch.bfloat16),
    "relative": (2048, 4, True, torch.bfloat16),
    "narrow": (37, 9, True, torch.float32),
    "float64": (1024, 4, True, torch.float64),
}


def innovation(case):
    width, span, relative, dtype = INNOVATION[case]
    y, history = torch.empty(8, width, dtype=dtype), torch.empty(2, span, width, dtype=dtype)
    offsets = torch.zeros(3, dtype=torch.int64)
    with recording() as seen:
        innovation_triton.forward(y, history, offsets, [1 / span] * span, relative)
    return seen


# --- companion -----------------------------------------------------------------------------------

# name: (rows, channels, order, dtype)
COMPANION = {
    "hyena_rtf": (8, 768, 64, torch.float32),
    "small": (8, 256, 4, torch.float32),
    "path_x": (1, 256, 2048, torch.float32),
    "ragged": (3, 77, 37, torch.float32),
    "float64": (1, 768, 64, torch.float64),
}


def companion(case):
    rows, width, order, dtype = COMPANION[case]

    def empty(*shape):
        return torch.empty(shape, dtype=dtype)

    with recording() as seen:
        position = torch.zeros(rows, dtype=torch.int64)
        coefficients = (empty(order, width), empty(order, width), empty(width))
        companion_triton.forward(
            empty(rows, width), empty(rows, order + 1, width), position, *coefficients
        )
    return seen


# --- rms_norm ------------------------------------------------------------------------------------

# name: (rows, channels, dtype)
RMS_NORM = {
    "model": (2048, 4096, torch.bfloat16),
    "small": (2048, 256, torch.float32),
    "float64": (64, 2048, torch.float64),
    "sum": (2048, 4096, torch.bfloat16),
}


def rms_norm(case):
    rows, width, dtype = RMS_NORM[case]
    exact = torch.promote_types(torch.float32, dtype)
    x, weight = torch.empty(rows, width, dtype=dtype), torch.empty(width, dtype=dtype)
    with recording() as seen:
        if case.startswith("sum"):
            residual, roots = torch.empty(rows, width), torch.empty(rows, dtype=exact)
            sum_triton.forward(residual, x, weight, True, 1e-5, 0.0)
            sum_triton.backward(residual, x, residual, weight, roots, 1e-5, 0.0)
        else:
            norm_triton.forward(x, weight, True, 1e-5, 0.0)
            norm_triton.backward(x, x, weight, torch.empty(rows, dtype=exact), 1e-5, 0.0)
    return seen


GROUPS = {
    "scans": (SCANS, scans),
    "linear": (LINEAR, linear),
    "feedback": (FEEDBACK, feedback),
    "linear_attention": (LINEAR_ATTENTION, linear_attention),
    "eidetic": (EIDETIC, eidetic),
    "diagonal": (DIAGONAL, diagonal),
    "innovation": (INNOVATION, innovation),
    "companion": (COMPANION, companion),
    "rms_norm": (RMS_NORM, rms_norm),
}


def launches(name, target=TARGETS[-1]):
    """Return the launches of ``group:case`` that differ: a label, kernel, arguments and options."""
    group, _, case = name.partition(":")
    more = {"target": target} if group == "eidetic" else {}
    found = {}
    for kernel, args, named in GROUPS[group][1](case, **more):
        label = kernel.__name__ + ("[reverse]" if named.get("REVERSE") else "")
        absent = (*(x is None for x in args),)
        found[label, absent, str(sorted(named.items()))] = label, (kernel, args, named)
    return [*found.values()]


# --- compiling --------------------------------------------------------------------------------


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


def named_target(text):
    return int(text) if text.isdigit() else text


def main():
    every = [f"{group}:{case}" for group, (cases, _) in GROUPS.items() for case in cases]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=every, metavar="group:case")
    parser.add_argument("--targets", nargs="+", type=named_target, default=TARGETS)
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    columns = ("case", "kernel", "target", "warps", "registers", "stack", "local", "shared")
    if arguments.table:
        write("| " + " | ".join(columns) + " |")
        write("|" + " --- |" * len(columns))
    for case in arguments.cases:
        for target in arguments.targets:
            for kernel, launch in launches(case, target):
                record = record_of(case, kernel, launch, target)
                if arguments.table:
                    write("| " + " | ".join(str(record[c]) for c in columns) + " |")
                else:
                    write(json.dumps(record))


def write(line):
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
