"""Configuration of hybrids: each layer's mixer by name, from any installed family."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from huggingface_hub.dataclasses import strict

from ssmzoo import families
from ssmzoo.modeling import Kind, SSMConfig, kind_of, suggestion


@strict
class HybridConfig(SSMConfig):
    """A hybrid: layers of several kinds in one backbone.

    Attributes:
        mixers: The kind of each layer, or a shorter pattern, which is repeated; its length divides
            ``num_hidden_layers``.
        kinds: By kind the fields of its own. ``family`` names its family, or "attention", where the
            kind's name does not; ``preset`` takes the fields of that preset of the family first. A
            built configuration has all fields of each kind but those that all layers share.
    """

    model_type = "ssmzoo_hybrid"
    mixers: list[str] = dataclasses.field(default_factory=lambda: ["linear_attention"])
    kinds: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    def complete(self) -> None:
        """Repeat the pattern, fill in all sections, and turn ``use_cache`` off where none is.

        Raises:
            LookupError: There is no such kind, family, preset or field.
            ValueError: A pattern of another length, a section of no layer, or fields of a kind that
                are not its own, out of their range, or do not fit each other.
        """
        SSMConfig.check(self)  # no section is to blame for these fields
        layers, given = self.num_hidden_layers, len(self.mixers)
        if not given or layers % given:
            raise ValueError(
                f"mixers must name the kind of each of num_hidden_layers = {layers} layers, or a "
                f"pattern whose length divides that, got {given} names"
            )
        self.mixers = self.mixers * (layers // given)
        for name in self.kinds:
            if name not in self.mixers:
                raise ValueError(
                    f"kinds must have sections of kinds that mixers names, got {name!r}"
                    f"{suggestion(name, set(self.mixers))}"
                )
        self.kinds = {name: self._found(name).section for name in dict.fromkeys(self.mixers)}
        if self.causal and not self.decodable:
            self.use_cache = False

    def kind(self, name: str) -> Kind:
        """Return a kind of layer: its configuration, and the family whose mixers it has."""
        return kind_of(f"kinds[{name!r}]", self.kinds.get(name, {}), self, name)

    def _found(self, name: str) -> Kind:
        try:
            return self.kind(name)
        except LookupError as error:
            if name in self.kinds:
                raise
            known = [*self.kinds, "attention", *(name for name in families() if name != "hybrid")]
            raise LookupError(
                f"mixers: no kind {name!r}{suggestion(name, known)}; there are "
                f"{', '.join(dict.fromkeys(known))}, and those of a section with a family in kinds"
            ) from error

    def _configs(self) -> Iterator[SSMConfig]:
        return (self.kind(name).config for name in self.kinds)

    @property
    def causal(self) -> bool:
        """Whether no output depends on a later input."""
        return all(config.causal for config in self._configs())

    @property
    def decodable(self) -> bool:
        """Whether the outputs of all kinds are the same however long the input is."""
        return all(config.decodable for config in self._configs())

    @property
    def token_inputs(self) -> tuple[str, ...]:
        """What the kinds need of every token."""
        return tuple(dict.fromkeys(n for config in self._configs() for n in config.token_inputs))

    @property
    def state_grows(self) -> bool:
        """Whether the state of some kind grows with the tokens seen."""
        return any(config.state_grows for config in self._configs())
