"""Which family serves a checkpoint: by the exact `model_type` of its config.json."""

from .protocols import ModelFamily


class FamilyRegistry:
    """Model families by name. One object a family, so its parts cannot disagree."""

    def __init__(self) -> None:
        """Empty."""
        self._families: dict[str, ModelFamily] = {}

    def register(self, family: ModelFamily) -> None:
        """Adds a family; ValueError if its model_type is taken."""
        if family.model_type in self._families:
            raise ValueError(f"model_type {family.model_type!r} is registered already")
        self._families[family.model_type] = family

    def get(self, model_type: str) -> ModelFamily:
        """The family of exactly this model_type.

        No substring or prefix matches: a new model with a similar name would silently be fed pixels
        of the wrong size.

        Raises:
            KeyError: unknown; the message lists what is known.
        """
        try:
            return self._families[model_type]
        except KeyError:
            known = ", ".join(self.names()) or "none"
            raise KeyError(f"no family for {model_type!r}; registered: {known}") from None

    def names(self) -> list[str]:
        """Registered model types, sorted."""
        return sorted(self._families)
