"""Longhorn's scan in C: the transition in longhorn_scan.c, the skeleton in ``scan``."""

from pathlib import Path

from ssmzoo_kernels.scan import cpu as scan

TRANSITION = scan.Transition(Path(__file__).with_name("longhorn_scan.c"))
load = TRANSITION.load
