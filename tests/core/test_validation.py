"""Wrong types of settings are sentences in the words of a recipe, and never those of pydantic."""

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, ValidationError

from ingot.core.settings import Settings
from ingot.core.validation import problems


class Cat(Settings):
    kind: Literal["cat"] = "cat"
    lives: int = Field(default=9, ge=1, le=9)
    """Lives left."""


class Dog(Settings):
    kind: Literal["dog"] = "dog"
    tricks: tuple[str, ...] = ()
    """Tricks it knows."""


class Zoo(Settings):
    name: str = Field(default="zoo", pattern="^[a-z]+$", max_length=5)
    """Its name."""
    places: int = Field(default=3, gt=0)
    """Places for animals."""
    share: float = Field(default=0.5, lt=1.0)
    """Share of cats."""
    open: bool = True
    """Whether it is open."""
    days: tuple[str, ...] = ()
    """Opening days."""
    prices: list[float] = Field(default_factory=list, max_length=2)
    """Prices."""
    mixture: dict[str, float] = Field(default_factory=dict)
    """Animal -> share."""
    size: Literal["small", "large"] = "small"
    """Its size."""
    sign: str | Literal[False] = ""
    """Text of the sign."""
    guide: str | tuple[str, ...] = ()
    """One guide or several."""
    animal: Annotated[Cat | Dog, Field(discriminator="kind")] = Cat()
    """The animal."""
    animals: tuple[Annotated[Cat | Dog, Field(discriminator="kind")], ...] = ()
    """More animals."""


@pytest.mark.parametrize(
    ("table", "sentences"),
    [
        ({"name": 3}, ["name: found 3, expected a text (Its name.)"]),
        ({"name": "Zoo"}, ["name: found 'Zoo', expected a text of the form ^[a-z]+$ (Its name.)"]),
        ({"name": "zoological"}, ["name: found 'zoological', expected at most 5 characters (Its name.)"]),
        ({"places": "many"}, ["places: found 'many', expected a whole number (Places for animals.)"]),
        ({"places": 2.5}, ["places: found 2.5, expected a whole number (Places for animals.)"]),
        ({"places": [2]}, ["places: found [2], expected a whole number (Places for animals.)"]),
        ({"places": 0}, ["places: found 0, expected more than 0 (Places for animals.)"]),
        ({"share": "half"}, ["share: found 'half', expected a number (Share of cats.)"]),
        ({"share": float("nan")}, ["share: found nan, expected a finite number (Share of cats.)"]),
        ({"share": 1.5}, ["share: found 1.5, expected less than 1 (Share of cats.)"]),
        ({"open": "perhaps"}, ["open: found 'perhaps', expected true or false (Whether it is open.)"]),
        ({"days": "monday"}, ["days: found 'monday', expected a list of texts (Opening days.)"]),
        ({"days": [1]}, ["days.0: found 1, expected a text (Opening days.)"]),
        ({"prices": 3}, ["prices: found 3, expected a list of numbers (Prices.)"]),
        ({"prices": [1, 2, 3]}, ["prices: found [1, 2, 3], expected at most 2 values (Prices.)"]),
        ({"mixture": "cats"}, ["mixture: found 'cats', expected a table (Animal -> share.)"]),
        ({"mixture": {"cats": "x"}}, ["mixture.cats: found 'x', expected a number (Animal -> share.)"]),
        ({"size": "middle"}, ["size: found 'middle', expected 'small' or 'large' (Its size.)"]),
        ({"sign": 3}, ["sign: found 3, expected a text or false (Text of the sign.)"]),
        ({"guide": 3}, ["guide: found 3, expected a text or a list of texts (One guide or several.)"]),
        ({"animal": 3}, ["animal: found 3, expected a table (The animal.)"]),
        ({"animal": {"kind": "cow"}}, ["animal: found 'cow', expected 'cat', 'dog' (The animal.)"]),
        ({"animal": {"lives": 9}}, ["animal: found {'lives': 9}, expected a table with 'kind' (The animal.)"]),
        ({"animal": {"kind": "cat", "lives": 10}}, ["animal.lives: found 10, expected at most 9 (Lives left.)"]),
        ({"animal": {"kind": "dog", "trick": 1}}, ["animal.trick: unknown setting; did you mean 'tricks'?"]),
        (
            {"animals": [{"kind": "dog", "tricks": "roll"}]},
            ["animals.0.tricks: found 'roll', expected a list of texts (Tricks it knows.)"],
        ),
        ({"placs": 1}, ["placs: unknown setting; did you mean 'places'?"]),
        (
            {"name": 1, "places": "x"},
            [
                "name: found 1, expected a text (Its name.)",
                "places: found 'x', expected a whole number (Places for animals.)",
            ],
        ),
    ],
)
def test_sentences(table: dict[str, Any], sentences: list[str]) -> None:
    with pytest.raises(ValidationError) as error:
        Zoo.model_validate(table)
    assert problems(Zoo, error.value) == sentences
    assert problems(Zoo, error.value, "stage.zoo") == [f"stage.zoo.{sentence}" for sentence in sentences]
