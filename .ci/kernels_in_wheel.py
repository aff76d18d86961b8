"""Put C kernels into a wheel, where ``SSMZOO_KERNELS`` names the machine that they are built for.

A hook of hatchling; pyproject.toml names it. Without the variable the wheel is for any machine, and
kernels are built where they run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# the kernels take nothing of the C library that is newer
SYSTEM = "manylinux_2_17"
BUILD = """
import pathlib, sys
from ssmzoo_kernels.prebuilt import build
build(sys.argv[1], pathlib.Path(sys.argv[2]))
"""


class KernelsInWheel(BuildHookInterface):
    """See the module."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the kernels, and name the machine in the wheel's tag."""
        if not (machine := os.environ.get("SSMZOO_KERNELS")):
            return
        self._folder = tempfile.TemporaryDirectory()  # until the wheel is written
        settings = {"CC": f"{machine}-linux-gnu-gcc", "PYTHONPATH": str(Path(self.root, "kernels"))}
        command = [sys.executable, "-c", BUILD, machine, self._folder.name]
        subprocess.run(command, check=True, env=os.environ | settings)
        build_data["force_include"][self._folder.name] = "ssmzoo_kernels/prebuilt_kernels"
        build_data["tag"] = f"py3-none-{SYSTEM}_{machine}"
        build_data["pure_python"] = False
