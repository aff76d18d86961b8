"""The C kernels compiled for narrower vectors than this CPU has, and for ARM.

Every op with a C kernel, briefly: as exact as the reference, and what NaN and infinity reach. For
this CPU each op's own tests say more. For ARM the kernels are only compiled, unless this is one:
``emulated.csv`` has what they gave there.
"""

import csv
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.kernels import compilers, emulated
from tests.kernels.contracts import CONTRACTS
from tests.kernels.test_few_rows_linear import *  # noqa: F403
from tests.kernels.test_token_recurrences import (  # noqa: F401
    test_delta_rule,
    test_linear_attention,
    test_selective,
)
from tests.kernels.test_token_step import (  # noqa: F401
    test_every_number_of_16_bits_is_read_as_it_is,
    test_map,
    test_rms_norm_without_a_weight,
)

import ssmzoo_kernels
from ssmzoo_kernels import compiling, native, prebuilt

KERNELS = Path(ssmzoo_kernels.__file__).parent
TARGETS = {
    "x86-64": {"SSMZOO_ARCH": "x86-64"},
    "x86-64-v3": {"SSMZOO_ARCH": "x86-64-v3"},
}
if torch.backends.cpu.get_cpu_capability() == "AVX2":
    del TARGETS["x86-64-v3"]  # each op's own tests run it
# emulated.py names targets, compilers.py compilers; ARM has one width of vectors
if platform.machine() in ("aarch64", "arm64") or os.environ.get("CC"):
    TARGETS = {"what is asked for": {}}
# clang has its OpenMP's header for this CPU alone; threads are then a parameter that nothing uses
FLAGS = {"gcc": ("-fopenmp",), "clang": ("-Wno-unused-parameter",)}
CHECKS = (
    "test_other_dtypes_are_as_exact_as_the_reference",
    "test_outputs_and_gradients_are_as_exact_as_the_reference",
    "test_nonfinite_values_reach_what_they_reach_in_the_reference",
)


def forget():
    """Let this process know neither the compiler nor a library that it has loaded."""
    for name, module in [*sys.modules.items()]:
        package, _, rest = name.partition(".")
        ours = ("native", "compiling", "dispatch", "cpu")
        if package == "ssmzoo_kernels" and rest.split(".")[-1] in ours:
            for function in vars(module).values():
                if hasattr(function, "cache_clear"):
                    function.cache_clear()


@pytest.fixture(
    scope="module",
    autouse=True,
    params=[
        # one worker builds all of a target's libraries
        pytest.param(x, marks=(pytest.mark.long, pytest.mark.xdist_group(f"target {x}")))
        for x in TARGETS
    ],
)
def built(request):
    """The names of the C files that were built for a target so far."""
    names, build = set(), native._build
    brought = {(file.stem, f"-DREAL={real}", *rest) for file, real, rest in prebuilt.sources()}
    brought |= {("probe",), ("threads",)}

    def watched(name, code, flags):
        assert (name, *(flag for flag in flags if flag.startswith("-D"))) in brought
        library = build(name, code, flags)
        names.add(name)
        return library

    with pytest.MonkeyPatch.context() as patch:
        for variable, value in TARGETS[request.param].items():
            patch.setenv(variable, value)
        forget()
        try:
            if wanted := os.environ.get("SSMZOO_ARCH"):
                compiling.check_target(wanted)
        except ValueError:
            pytest.skip("the CPU has no such vectors")
        patch.setattr(native, "_build", watched)
        yield names
    forget()


def cases():
    for contract in CONTRACTS:
        # widths and state sizes that fill no vector and no tile
        briefly = type(
            contract.__name__,
            (contract,),
            {
                "backends": ("cpu",),
                "shapes": (contract.ragged,),
                "sizes": contract.sizes | contract.ragged,
                "dtypes": (torch.float64,),
            },
        )
        for check in sorted({*CHECKS} & {*briefly.checks()}):
            for case in briefly.cases(check):
                yield pytest.param(briefly, check, case, id=f"{contract.__name__}-{check}-{case}")


def test_the_kernels_are_compiled_for_the_target_that_was_asked_for():
    assert f"-march={os.environ.get('SSMZOO_ARCH') or 'native'}" in native._flags()
    compiler = " ".join(compiling.command())
    assert compiler == os.environ.get("CC", compiler)


@pytest.mark.parametrize(("contract", "check", "case"), [*cases()])
def test_the_contract(built, contract, check, case):
    getattr(contract(), check)(case)
    own = {path.stem for path in (KERNELS / contract.declaration.name).glob("*.c")}
    assert built >= own


class TestElsewhere:
    """What can be said of ARM and of other compilers without them."""

    @pytest.fixture(autouse=True)
    def built(self):
        """Build no library to load."""

    @pytest.mark.long
    @pytest.mark.parametrize(("compiler", "real"), [("gcc", "float"), ("clang", "double")])
    def test_the_sources_compile_without_warnings(self, compiler, real, tmp_path):
        if not emulated.installed(compiler):
            pytest.skip(f"no {compiler} for ARM is installed")
        for source in sorted(KERNELS.rglob("*.c")):
            command = [
                *emulated.COMPILERS[compiler].split(), "-O1", "-std=gnu11", "-Wall", "-Wextra",
                "-Werror", "-Wno-psabi", *FLAGS[compiler], f"-DREAL={real}", "-DCHUNK=16",
                "-DPAIRS=1", f"-I{KERNELS}", f"-I{KERNELS / 'scan'}",
                "-c", str(source), "-o", str(tmp_path / "x.o"),
            ]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr

    def test_the_committed_runs_of_other_compilers_failed_nowhere(self):
        rows = [*csv.DictReader(compilers.TABLE.read_text("utf-8").splitlines())]
        assert not any(int(row["failures"]) for row in rows)
        assert all(int(row["tests"]) > 300 for row in rows)
        assert {row["compiler"] for row in rows} == {*compilers.COMPILERS}

    def test_the_committed_runs_failed_nowhere(self):
        rows = [*csv.DictReader(emulated.TABLE.read_text("utf-8").splitlines())]
        assert {row["target"] for row in rows} == {*emulated.TARGETS}
        assert not any(int(row["failures"]) for row in rows)
        assert all(int(row["tests"]) > 300 for row in rows)
