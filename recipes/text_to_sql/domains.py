"""The worlds that questions are asked about: sixteen small tables, each with a name, two categories, two numbers.

A domain says which columns its table has and which values may stand in them; `generator.py` draws rows and
questions from it. The last four domains are held out: no question about them is ever trained on.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Category:
    """A text column with few values."""

    column: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Number:
    """An integer column, drawn evenly from `low` to `high` in steps of `step`."""

    column: str
    low: int
    high: int
    step: int = 1


@dataclass(frozen=True, slots=True)
class Domain:
    """One table. `plural` is what a question calls its rows; `names` are the values of its name column."""

    table: str
    singular: str
    plural: str
    name: str
    names: tuple[str, ...]
    categories: tuple[Category, Category]
    numbers: tuple[Number, Number]

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns in the order of the table, `id` first."""
        return ("id", self.name, *(c.column for c in self.categories), *(n.column for n in self.numbers))

    @property
    def schema(self) -> str:
        """The table as the prompt shows it: `books(id, title, genre, language, price, year)`."""
        return f"{self.table}({', '.join(self.columns)})"


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _pairs(first: str, second: str) -> tuple[str, ...]:
    """Every word of `first` before every word of `second`: 'Red Gate', 'Red Lake', ..."""
    return tuple(f"{a} {b}" for a in _words(first) for b in _words(second))


_PEOPLE = _words(
    "Ada Boris Chen Dora Emil Farid Greta Hugo Ines Jonas Kira Leo Mara Nils Olga Pablo Quinn Rosa Sven Tara "
    "Umar Vera Willa Xaver Yara Zoe Anton Bela Cleo Dina"
)
_PLACES = _pairs("North South Old New Upper Lower", "Haven Ridge Brook Mill Cross Bay")
_TITLES = _pairs("Silent Golden Broken Hidden Last Winter", "Garden River Letter Clock Harbor Song")
_BRANDS = _pairs("Nova Terra Luma Vento Orbit Pico", "One Plus Max Air Go Pro")

_COLORS = Category("color", ("red", "blue", "green", "black", "white", "silver"))
_SEASONS = Category("season", ("spring", "summer", "autumn", "winter"))
_COUNTRIES = Category("country", ("France", "Japan", "Brazil", "Kenya", "Canada", "Norway", "India"))
_CITIES = Category("city", ("Oslo", "Lyon", "Porto", "Kyoto", "Lima", "Turin", "Quito"))

TRAIN = (
    Domain(
        "books", "book", "books", "title", _TITLES,
        (
            Category("genre", ("mystery", "romance", "history", "poetry", "fantasy")),
            Category("language", ("English", "Spanish", "German", "Arabic", "Hindi")),
        ),
        (Number("price", 5, 60), Number("year", 1950, 2024)),
    ),
    Domain(
        "employees", "employee", "employees", "name", _PEOPLE,
        (Category("department", ("sales", "legal", "design", "finance", "support")), _CITIES),
        (Number("salary", 28000, 96000, 500), Number("age", 20, 64)),
    ),
    Domain(
        "songs", "song", "songs", "title", _TITLES,
        (
            Category("style", ("jazz", "rock", "folk", "soul", "techno")),
            Category("label", ("Bluebird", "Harvest", "Monsoon", "Parade")),
        ),
        (Number("seconds", 90, 480), Number("plays", 100, 9900, 50)),
    ),
    Domain(
        "cars", "car", "cars", "model", _BRANDS,
        (Category("fuel", ("petrol", "diesel", "electric", "hybrid")), _COLORS),
        (Number("price", 9000, 72000, 250), Number("mileage", 0, 180000, 500)),
    ),
    Domain(
        "students", "student", "students", "name", _PEOPLE,
        (
            Category("major", ("biology", "physics", "music", "law", "chemistry")),
            Category("dorm", ("Maple", "Cedar", "Birch", "Willow")),
        ),
        (Number("score", 40, 100), Number("credits", 10, 180)),
    ),
    Domain(
        "recipes", "recipe", "recipes", "dish",
        _pairs("Spicy Sweet Smoky Creamy Crisp Baked", "Rice Soup Pie Beans Salad Fish"),
        (Category("cuisine", ("Thai", "Greek", "Mexican", "Italian", "Korean")), _SEASONS),
        (Number("minutes", 5, 120, 5), Number("calories", 90, 950, 10)),
    ),
    Domain(
        "rivers", "river", "rivers", "name",
        _pairs("Stone Amber Swift Grey Twin Cold", "Run Fork Water Creek Bend Wash"),
        (_COUNTRIES, Category("climate", ("tropical", "arid", "temperate", "polar"))),
        (Number("length", 40, 6000, 20), Number("depth", 1, 90)),
    ),
    Domain(
        "laptops", "laptop", "laptops", "model", _BRANDS,
        (Category("brand", ("Acorn", "Zenith", "Kestrel", "Hexa")), _COLORS),
        (Number("price", 300, 3200, 20), Number("memory", 4, 64, 4)),
    ),
    Domain(
        "hotels", "hotel", "hotels", "name", _PLACES,
        (_CITIES, Category("view", ("sea", "garden", "street", "mountain"))),
        (Number("rooms", 8, 400), Number("rate", 40, 520, 5)),
    ),
    Domain(
        "plants", "plant", "plants", "name",
        _pairs("Dwarf Giant Wild Royal Desert Marsh", "Fern Lily Thistle Moss Orchid Sage"),
        (Category("soil", ("clay", "sand", "loam", "peat")), _SEASONS),
        (Number("height", 5, 300, 5), Number("price", 2, 80)),
    ),
    Domain(
        "orders", "order", "orders", "customer", _PEOPLE,
        (
            Category("status", ("open", "paid", "shipped", "returned")),
            Category("method", ("card", "cash", "transfer", "voucher")),
        ),
        (Number("total", 10, 990, 5), Number("items", 1, 30)),
    ),
    Domain(
        "trains", "train", "trains", "name",
        _pairs("Royal Coastal Alpine Night Valley Desert", "Arrow Star Express Comet Runner Link"),
        (
            Category("operator", ("Railia", "Transco", "Norda", "Velox")),
            Category("class", ("local", "regional", "express")),
        ),
        (Number("seats", 60, 900, 10), Number("speed", 70, 320, 5)),
    ),
)  # fmt: skip

HELD_OUT = (
    Domain(
        "flights", "flight", "flights", "code", _pairs("Alpha Bravo Delta Echo Tango Kilo", "11 24 37 48 52 69"),
        (
            Category("airline", ("Skylark", "Condor", "Meridian", "Aurora")),
            Category("origin", ("Rome", "Cairo", "Seoul", "Miami", "Delhi")),
        ),
        (Number("duration", 40, 840, 5), Number("fare", 30, 1500, 10)),
    ),
    Domain(
        "players", "player", "players", "name", _PEOPLE,
        (
            Category("team", ("Falcons", "Bears", "Comets", "Sharks", "Wolves")),
            Category("position", ("goalkeeper", "defender", "midfielder", "striker")),
        ),
        (Number("goals", 0, 45), Number("age", 17, 39)),
    ),
    Domain(
        "museums", "museum", "museums", "name", _PLACES,
        (_COUNTRIES, Category("theme", ("art", "science", "nature", "war", "design"))),
        (Number("visitors", 1000, 90000, 500), Number("fee", 0, 35)),
    ),
    Domain(
        "phones", "phone", "phones", "model", _BRANDS,
        (Category("maker", ("Lyra", "Quanta", "Mirex", "Sonido")), Category("system", ("Nimbus", "Quartz", "Fjord"))),
        (Number("battery", 2000, 6000, 100), Number("weight", 110, 260, 2)),
    ),
)  # fmt: skip
