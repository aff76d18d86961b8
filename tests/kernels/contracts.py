"""What the contract of each op is run on; its checks are in ``ssmzoo/testing/ops``.

``test_<op>.py`` runs a class on the CPU's backends, ``interpreted_*.py`` on the Triton kernels.
"""

import itertools

import torch

import ssmzoo_kernels
from ssmzoo.testing import OpContract
from ssmzoo.testing.ops import PACKED
from ssmzoo_kernels import companion_step, inverse_series
from ssmzoo_kernels.declaration import declared


def lengths(*counts, **others):
    """Return shapes of many lengths and fixed other sizes."""
    return [{"L": length, **others} for length in counts]


def grid(**axes):
    """Return shapes of all combinations of some sizes."""
    return [dict(zip(axes, x, strict=True)) for x in itertools.product(*axes.values())]


def op(name):
    """Return the attributes that name a public op and its declaration."""
    return staticmethod(getattr(ssmzoo_kernels, name)), declared()[name]


class CausalConv1d(OpContract):
    op, declaration = op("causal_conv1d")
    forms = {"silu": {"activation": "silu"}, "plain": {"activation": None}}
    sizes = {"B": 2, "L": 40, "D": 33, "K": 4}
    many = {"L": 300, "D": 200}
    shapes = (
        *lengths(0, 1, 2, 3, 4, 7, 64, 127, 128, 129, 300, D=20),
        *grid(L=[21], D=[1, 16, 63, 300], K=[1, 2, 3, 4, 5, 9]),
    )
    packings = (((0, 1, 2, 3, 4, 0, 130), {"D": 18}),)
    cuts = ((1,), (2,), (3,), (20,))
    exempt = {"test_state_is_float32": "the state is the last inputs, in their dtype"}


class LinearScan(OpContract):
    op, declaration = op("linear_scan")
    sizes = {"B": 2, "L": 40, "D": 33}
    shapes = (
        *lengths(0, 1, 2, 7, 63, 64, 65, 1000, D=5),
        *grid(L=[33], D=[0, 1, 3, 64, 129, 300]),
        {"B": 1, "L": 4999, "D": 3},  # long and narrow: cut into chunks
    )
    packings = (((0, 1, 16, 17, 0, 33, 2500), {"D": 3}),)
    cuts = ((1,), (20,), (39,))
    many = {"B": 1, "L": 30000, "D": 5}


class ComplexLinearScan(LinearScan):
    complex = ("a", "b", "initial_state")
    values = {"a": lambda a: a / 1.5}  # products that neither vanish nor explode
    dtypes = (torch.float64,)


class LonghornScan(OpContract):
    op, declaration = op("longhorn_scan")
    sizes = {"B": 2, "L": 40, "D": 33, "N": 4}
    shapes = (
        *lengths(0, 1, 2, 7, 15, 16, 17, 63, 64, 65, D=20),
        *grid(L=[33], D=[1, 16, 63, 130], N=[1, 3, 16, 17, 64]),
        {"L": 1, "D": 20, "N": 17},  # a whole tile of states and a rest
        {"B": 1, "L": 200, "D": 20, "N": 40},  # several chunks between saved states
    )
    packings = (
        (PACKED, {}),
        ((0, 48, 97, 0, 15, 40), {"D": 20, "N": 40}),
        ((17,) * 40, {"D": 6, "N": 5}),  # sequences that take turns
    )


class SelectiveScan(OpContract):
    op, declaration = op("selective_scan")
    forms = {"euler": {"discretization": "euler"}, "zoh": {"discretization": "zoh"}}
    sizes = {"B": 2, "L": 40, "D": 33, "N": 4}
    values = {"A": lambda A: -A.exp()}
    shapes = (
        *lengths(0, 1, 2, 15, 16, 17, 63, 64, 65, D=20),
        *grid(L=[18], D=[1, 16, 130], N=[1, 3, 16, 17]),
        {"L": 1, "D": 20, "N": 17},
        {"B": 1, "L": 160, "D": 20, "N": 40},
    )
    packings = (
        (PACKED, {}),
        ((0, 48, 57, 0, 15, 40), {"D": 20, "N": 40}),
        ((5,) * 40, {"D": 6, "N": 5}),
    )


class Innovation(OpContract):
    op, declaration = op("innovation")
    forms = {
        name: {"relative": name == "relative", "weights": [0.4, 0.3, 0.2, 0.1]}
        for name in ("absolute", "relative")
    }
    sizes = {"B": 2, "L": 40, "D": 33, "k": 4}
    shapes = lengths(0, 1, 3, 4, 5, 63, 64, 65, 200, D=20)
    packings = (((5, 0, 3, 1, 70, 4), {"D": 18}),)
    cuts = ((1,), (3,), (4,), (2, 3, 20, 29))
    many = {"L": 300, "D": 400}
    exempt = {"test_state_is_float32": "the history is the last inputs, in their dtype"}

    @classmethod
    def state(cls):
        return "history"

    @classmethod
    def final(cls):
        return 1


class RMSNorm(OpContract):
    op, declaration = op("rms_norm")
    forms = {"": {"eps": 1e-5}, "offset": {"eps": 0.25, "offset": 1.0}}
    sizes = {"B": 5, "D": 33}
    # of a single number the reference's own error is a matter of luck, and so is the budget
    shapes = (*grid(B=[15, 17], D=[1, 16, 63, 300]), {"B": 0}, {"B": 1}, {"B": 1030, "D": 5})
    many = {"B": 400, "D": 300}
    ragged = {"B": 4, "D": 19}


class AddRMSNorm(RMSNorm):
    op, declaration = op("add_rms_norm")


class DiagonalStep(OpContract):
    op, declaration = op("diagonal_step")
    sizes = {"B": 2, "H": 5, "N": 3}
    shapes = ({"B": 1, "H": 1, "N": 1}, {"B": 3, "H": 2, "N": 8}, {"B": 1, "H": 5, "N": 33})
    many = {"B": 4, "H": 300, "N": 64}
    unregistered = ("eager",)  # one line of torch
    dtypes = (torch.float64,)


def one_companion_step(u, ring, position, a, b, d, *, backend="auto"):
    """As kernels have it, each channel with its own coefficients."""
    return companion_step(u, ring, position, a.mT, b.mT, d, backend=backend)


class CompanionStep(OpContract):
    op, declaration = staticmethod(one_companion_step), declared()["companion_step"]
    sizes = {"B": 3, "D": 4, "n": 5}
    shapes = grid(D=[1, 7, 8, 31, 32, 33, 64, 65, 150], n=[5])
    values = {"position": lambda x: torch.arange(len(x)), "a": lambda a: a / len(a)}
    many = {"B": 2, "D": 300, "n": 200}
    dtypes = (torch.float64,)
    exempt = {
        "test_bad_tensors_are_one_clear_error": "its coefficients are the public op's, turned",
        "test_mixed_dtypes_are_as_exact_as_the_reference": "the ring is float32 or float64",
    }


class FeedbackScan(OpContract):
    op, declaration = op("feedback_scan")
    forms = {"march": {"solver": "march"}}
    sizes = {"B": 2, "L": 40, "D": 33, "N": 4}
    values = {"lam": lambda x: -x.sigmoid(), "w": lambda x: x / 2, "w_gamma": lambda x: x / 2}
    shapes = (
        *lengths(0, 1, 2, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, D=20),
        *grid(L=[35], D=[1, 16, 63, 130], N=[1, 2, 3, 6, 7, 16, 17]),
        *grid(L=[34], B=[1, 4, 5, 11], D=[3, 16, 25], N=[8]),  # sequences side by side
        {"B": 1, "L": 200, "D": 20, "N": 40},
    )
    packings = (
        (PACKED, {}),
        ((0, 64, 97, 0, 15, 24), {"D": 20, "N": 40}),
        ((9, 9, 9, 9, 30), {"D": 18}),
    )
    cuts = ((1,), (16,), (23,), (32,), (39,))
    # the recurrence amplifies roundings, and how much a few lanes do is chance: the loop with its
    # sums turned around and 1 + lam s multiplied out errs up to 3.4 times as much as the loop
    slack = 4
    exempt = {
        "test_nonfinite_values_reach_what_they_reach_in_the_reference": "they are refused",
        "test_nonfinite_values_stay_in_their_packed_row": "they are refused",
    }

    def run(self, tensors, case, **options):
        if case.backend in ("reference", "auto"):
            options["solver"] = "march"  # the one that the reference knows
        return super().run(tensors, case, **options)


class NewtonFeedbackScan(FeedbackScan):
    forms = {"newton": {"solver": "newton"}}
    exempt = FeedbackScan.exempt | dict.fromkeys(
        (
            "test_outputs_and_gradients_are_as_exact_as_the_reference",
            "test_small_errors_are_noticed",
            "test_other_dtypes_are_as_exact_as_the_reference",
            "test_mixed_dtypes_are_as_exact_as_the_reference",
            "test_optional_tensors_may_be_absent",
            "test_packed_rows_are_as_exact_as_the_reference",
            "test_token_by_token_equals_one_pass",
        ),
        "Newton's states are as exact as its tolerance; float64 is judged",
    )


class FftConv(OpContract):
    op, declaration = op("fft_conv")
    forms = {"": {"output_final_state": True}}
    sizes = {"B": 2, "L": 33, "D": 3, "K": 40, "F": 5}
    shapes = (*lengths(0, 1, 2, 9, 64, 1000), {"F": 40}, {"K": 1})
    packings = (((5, 0, 2, 1, 5, 40, 0), {"K": 7, "F": 4}), ((1, 8, 2), {"F": 40}))
    many = {"B": 3, "L": 100, "D": 20, "K": 50}
    exact = ()
    nonfinite = "sequence"
    exempt = {
        "test_state_is_float32": "the state is the last inputs, in their dtype",
        "test_state_continues": "the future filter sees the next piece",
        "test_token_by_token_equals_one_pass": "the future filter sees the next token",
        "test_later_tokens_do_not_change_earlier_outputs": "the future filter sees them",
    }

    @classmethod
    def state(cls):
        return "initial_state"

    @classmethod
    def final(cls):
        return 1

    def judge(self, tensors, case, dtype, call=None, **options):
        """A transform of size F errs by about eps log2(F) of its largest result; three in a row."""
        given = {n: x if x is None or dtype is None else x.to(dtype) for n, x in tensors.items()}
        wide = {n: x if x is None else x.double() for n, x in given.items()}
        expected = self.results(wide, case._replace(backend="reference"), **options)
        found = self.results(given, case, call=call, **options)
        single = 3 * 11 * torch.finfo(torch.float32).eps
        for name, x in found.items():
            place = name.removeprefix("gradient of ")
            assert x.dtype == given[place if place in given else "u"].dtype, name
            half = x.dtype in (torch.bfloat16, torch.float16) or dtype is None
            rounding = 2 * torch.finfo(torch.bfloat16 if dtype is None else x.dtype).eps
            allowed = 1e-12 if dtype is torch.float64 else single + half * rounding
            self.compare({name: x.double()}, {name: expected[name]}, allowed)
        self.ran(case.backend)


JUDGED_BY_SUM = dict.fromkeys(
    (
        "test_outputs_and_gradients_are_as_exact_as_the_reference",
        "test_small_errors_are_noticed",
        "test_other_dtypes_are_as_exact_as_the_reference",
        "test_mixed_dtypes_are_as_exact_as_the_reference",
        "test_optional_tensors_may_be_absent",
        "test_each_output_alone_has_the_reference_gradients",
        "test_bad_tensors_are_one_clear_error",
    ),
    "test_vandermonde.py holds it to the direct sum, whose exponents are float64",
)


class Vandermonde(OpContract):
    op, declaration = op("vandermonde")
    forms = {"": {"length": 11, "offset": 1}}
    sizes = {"B": 2, "H": 3, "N": 4}
    ragged = {"B": 4, "H": 3, "N": 5}
    many = {"H": 30}
    values = {
        "exponent": lambda x: torch.complex(-x.real.exp() / 4, x.imag),
        "reversed": lambda x: x > 0,
    }
    nonfinite = "row"
    exempt = JUDGED_BY_SUM


class VandermondeState(Vandermonde):
    op, declaration = op("vandermonde_state")
    forms = {"": {"offset": 1}}
    sizes = {"B": 2, "L": 11, "H": 3, "N": 4}
    ragged = {"B": 4, "L": 9, "H": 3, "N": 5}


class RationalKernel(OpContract):
    op, declaration = op("rational_kernel")
    forms = {
        "exact": {"length": 40, "mode": "exact"},
        "truncated": {"length": 40, "mode": "truncated", "trunc_len": 64},
    }
    sizes = {"D_a": 2, "D": 4, "n": 5}
    ragged = {"D_a": 19, "D": 19}
    many = {"n": 20}
    shapes = ({"n": 1}, {"n": 20})
    values = {"a": lambda a: 0.9 * a.tanh() / a.shape[1]}
    slack = 2 + (64).bit_length()  # what rounding does to FFTs of this length
    nonfinite = "row"
    exempt = {"test_few_or_no_tokens_have_gradients": "it has no tokens"}


def one_inverse_series(a, *, length, backend="auto"):
    """Torch's FFT, which serves every device: it has no backends to choose from."""
    return inverse_series(a, length)


class InverseSeries(OpContract):
    op, declaration = staticmethod(one_inverse_series), declared()["inverse_series"]
    forms = {"": {"length": 40}}
    sizes = {"D_a": 4, "n": 5}
    values = RationalKernel.values
    exempt = dict.fromkeys(
        (
            "test_outputs_and_gradients_are_as_exact_as_the_reference",
            "test_small_errors_are_noticed",
            "test_other_dtypes_are_as_exact_as_the_reference",
            "test_mixed_dtypes_are_as_exact_as_the_reference",
            "test_use_backend_chooses",
            "test_forward_mode_is_the_reference_alone",
            "test_bad_backends_are_one_clear_error",
            "test_each_output_alone_has_the_reference_gradients",
            "test_few_or_no_tokens_have_gradients",
            "test_nonfinite_values_reach_what_they_reach_in_the_reference",
        ),
        "it has one implementation",
    )


LATE = ("late_k", "late_v", "late_past_k", "late_past_v")


class EideticAttention(OpContract):
    op, declaration = op("eidetic_attention")
    forms = {"": {"window": 4}}
    sizes = {"B": 2, "L": 11}
    late = False
    shapes = lengths(4, 5, 64)
    packings = (((5, 0, 9, 1, 70), {}),)
    ragged = {"B": 5, "L": 9}
    many = {"L": 40}
    nonfinite = "unseen"
    exempt = {
        "test_packed_rows_equal_single_rows": "memories are a row of chunks of all sequences",
        "test_order_of_a_batch_does_not_matter": "memories are a row of chunks of all sequences",
        "test_bad_tensors_are_one_clear_error": "test_eidetic_attention.py has its many rules",
        "test_small_errors_are_noticed": "no query sees the past that is drawn",
        "test_optional_tensors_may_be_absent": "most are given together or not at all",
    }

    def draw(self, *, packed=None, dtype=torch.float64, **sizes):
        known = {**self.sizes, **sizes}
        rows = [*packed] if packed is not None else [known["L"]] * known["B"]
        batch, length = (1, sum(rows)) if packed is not None else (len(rows), known["L"])
        chunks = sum(-(-count // 4) for count in rows)
        generator = torch.Generator().manual_seed(0)

        def random(*shape):
            x = torch.randn(shape, generator=generator, dtype=torch.float64)
            return x.to(dtype)

        drawn = {"q": random(batch, length, 4, 4)}
        drawn |= {n: random(batch, length, 2, 4) for n in ("k", "v")}
        drawn |= {n: random(len(rows), 6, 2, 4) for n in ("past_k", "past_v")}
        drawn |= {n: random(chunks, 3, 2, 4) for n in ("mem_k", "mem_v")}
        drawn |= {n: random(batch, length, 2, 4) if self.late else None for n in LATE[:2]}
        drawn |= {n: random(len(rows), 6, 2, 4) if self.late else None for n in LATE[2:]}
        return drawn | {
            "mem_count": torch.arange(chunks) % 4,
            "mem_positions": torch.arange(3).repeat(chunks, 1),
            "seen": torch.zeros(len(rows), dtype=torch.int64),
        }

    def run(self, tensors, case, **options):
        options["late_span"] = 0 if tensors["late_k"] is None else 3
        return super().run(tensors, case, **options)


class LateEideticAttention(EideticAttention):
    backends = ("eager",)
    late = True
    exempt = EideticAttention.exempt | dict.fromkeys(
        ("test_opcheck", "test_gradients_match_finite_differences"),
        "it is the op without late keys, whose reference has the gradients",
    )


class GatedLinearAttention(OpContract):
    op, declaration = op("gated_linear_attention")
    forms = {
        "additive": {"rule": "additive", "chunk": 64},
        "delta": {"rule": "delta", "scale": 0.7, "chunk": 16},
    }
    sizes = {"B": 2, "L": 40, "G": 1, "H": 2, "K": 3, "V": 2, "E": 1}
    values = {
        # a write of more than twice the error makes the delta rule's states grow
        "k": lambda x: x / x.norm(dim=-1, keepdim=True),
        "beta": lambda x: 2 * x.sigmoid(),
        # some tokens forget nearly all, among others that forget little
        "log_decay": lambda x: (-x.exp() / 8).where(x < 1.5, -50.0),
    }
    shapes = (
        *lengths(0, 1, 15, 16, 17, 63, 64, 65, 130, G=2, H=4, K=5, V=6),
        # one row is a test of its own: there all keys are parallel
        *(
            {"L": 33, "G": groups, "H": 3, "K": keys, "V": width}
            for groups, keys, width in (
                *((1, 2, 1), (1, 16, 35), (1, 37, 16)),
                *((3, 2, 35), (3, 16, 16), (3, 37, 35)),
            )
        ),
    )
    packings = ((PACKED, {}), ((0, 64, 33, 0, 15, 24), {"K": 40, "H": 2}))
    cuts = ((16,), (3, 19, 39))
    many = {"L": 300, "H": 6, "K": 16, "V": 16}
    ragged = {"B": 4, "L": 37, "G": 2, "H": 6, "K": 5, "V": 7}


class RowwiseGatedLinearAttention(GatedLinearAttention):
    sizes = {**GatedLinearAttention.sizes, "E": 3}
    shapes = (
        *lengths(0, 1, 15, 16, 17, 63, 64, 65, 130, G=2, H=4, K=5, V=6, E=5),
        {"L": 33, "G": 1, "H": 3, "K": 37, "E": 37, "V": 35},
    )
    packings = ((PACKED, {}), ((0, 64, 33, 0, 15, 24), {"K": 40, "E": 40, "H": 2}))
    many = {"L": 300, "H": 6, "K": 16, "E": 16, "V": 16}
    ragged = {**GatedLinearAttention.ragged, "E": 5}


class GeneralizedDeltaRule(OpContract):
    op, declaration = op("generalized_delta_rule")
    sizes = {"B": 2, "L": 40, "H": 2, "K": 4, "V": 3}
    shapes = (
        *lengths(0, 1, 2, 15, 16, 17, 64, H=3, K=5, V=6),
        *grid(L=[18], K=[1, 16, 37], V=[1, 35]),
    )
    many = {"L": 300, "H": 4, "K": 16, "V": 17}
    ragged = {"B": 4, "L": 37, "H": 2, "K": 5, "V": 19}
    # states of random ones would grow beyond all bounds
    values = {"w": torch.sigmoid, "a": lambda a: a / 4, "b": lambda b: b / 4}


# of calls that every backend takes
_NAMED = [x for x in [*vars().values()] if isinstance(x, type)]
CONTRACTS = [
    x for x in _NAMED if issubclass(x, OpContract) and x not in (OpContract, LateEideticAttention)
]
# inductor writes nothing for complex numbers
DISTINCT = [contract for contract in CONTRACTS if not contract.complex]
