"""Wrong types of settings are sentences in the words of a recipe, and never those of pydantic."""

from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pytest
from pydantic import Field, ValidationError, field_validator

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
    hours: int | tuple[int, ...] | None = None
    """Hours of feeding."""
    feedings: tuple[Annotated[int, Field(le=24)], ...] = Field(default=(8,), min_length=1)
    """Hours of the day."""
    animal: Annotated[Cat | Dog, Field(discriminator="kind")] = Cat()
    """The animal."""
    depth: Annotated[int, Field(ge=1)] | Literal["none", "all"] = 1
    """Depth of the pond."""
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
        ({"places": True}, ["places: found true, expected a whole number (Places for animals.)"]),
        ({"share": False}, ["share: found false, expected a number (Share of cats.)"]),
        ({"prices": [1, True]}, ["prices.1: found true, expected a number (Prices.)"]),
        ({"mixture": {"cats": True}}, ["mixture.cats: found true, expected a number (Animal -> share.)"]),
        ({"hours": True}, ["hours: found true, expected a whole number (Hours of feeding.)"]),
        ({"hours": [8, False]}, ["hours.1: found false, expected a whole number (Hours of feeding.)"]),
        (
            {"animal": {"kind": "cat", "lives": True}},
            ["animal.lives: found true, expected a whole number (Lives left.)"],
        ),
        ({"days": True}, ["days: found true, expected a list of texts (Opening days.)"]),
        ({"feedings": [True]}, ["feedings.0: found true, expected a whole number (Hours of the day.)"]),
        ({"places": "2"}, ["places: found '2', expected a whole number (Places for animals.)"]),
        ({"share": "0.5"}, ["share: found '0.5', expected a number (Share of cats.)"]),
        ({"prices": [1, "2"]}, ["prices.1: found '2', expected a number (Prices.)"]),
        ({"mixture": {"cats": "0.5"}}, ["mixture.cats: found '0.5', expected a number (Animal -> share.)"]),
        ({"hours": "8"}, ["hours: found '8', expected a whole number (Hours of feeding.)"]),
        ({"animal": {"kind": "cat", "lives": "9"}}, ["animal.lives: found '9', expected a whole number (Lives left.)"]),
        ({"open": "no"}, ["open: found 'no', expected true or false (Whether it is open.)"]),
        ({"open": 1}, ["open: found 1, expected true or false (Whether it is open.)"]),
        ({"depth": "2"}, ["depth: found '2', expected a whole number (Depth of the pond.)"]),
        ({"depth": "most"}, ["depth: found 'most', expected a whole number or 'none' or 'all' (Depth of the pond.)"]),
        ({"sign": 0}, ["sign: found 0, expected true or false (Text of the sign.)"]),
        ({"feedings": [25]}, ["feedings.0: found 25, expected at most 24 (Hours of the day.)"]),
        ({"feedings": []}, ["feedings: found [], expected 1 or more values (Hours of the day.)"]),
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


def test_true_and_false_stay_where_they_belong() -> None:
    zoo = Zoo.model_validate({"open": False, "sign": False, "places": 1, "share": 0, "hours": [1, 0]})
    assert (zoo.open, zoo.sign, zoo.places, zoo.hours) == (False, False, 1, (1, 0))


def test_numbers_of_numpy_are_numbers() -> None:
    zoo = Zoo.model_validate({"share": np.float64(0.25), "prices": [np.float64(2.0)], "places": np.int64(4)})
    assert (zoo.share, zoo.prices, zoo.places) == (0.25, [2.0], 4)


class Size(Settings):
    first: int = 1
    """First."""


class Field1(Settings):
    rows: int | Size = 1
    """Rows, or a table."""


def test_a_text_is_no_number_beside_a_table_either() -> None:
    with pytest.raises(ValidationError) as error:
        Field1.model_validate({"rows": "16"})
    assert problems(Field1, error.value) == ["rows: found '16', expected a whole number (Rows, or a table.)"]


class Old(Settings):
    RENAMED: ClassVar = {"seats": "places"}

    places: int = 1
    """Places."""


def test_true_is_no_number_under_an_old_name_either() -> None:
    with pytest.warns(match="seats is now called places"), pytest.raises(ValidationError) as error:
        Old.model_validate({"seats": True})
    assert problems(Old, error.value) == ["places: found true, expected a whole number (Places.)"]


class Guest(Settings):
    town: str = Field(default="", alias="from")

    @field_validator("town")
    @classmethod
    def _named(cls, value: str) -> str:
        if not value:
            raise ValueError("missing; name a town")
        return value


def test_a_setting_that_is_not_given_is_named_as_in_the_recipe():
    with pytest.raises(ValidationError) as caught:
        Guest()
    assert problems(Guest, caught.value, "stage.visit") == ["stage.visit.from: missing; name a town"]
