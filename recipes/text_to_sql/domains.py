"""The worlds that questions are asked about: 21 small tables, each with a name, two categories and two numbers.

A domain says which columns its table has and which values may stand in them; `generator.py` draws rows and
questions from it. A second table tells one thing more about each value of a category, for questions that need a
join. No question about the `VALIDATION` domains (to choose a checkpoint) or the `HELD_OUT` ones (for the figures
that one reports) is ever trained on.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Category:
    """A text column with few values."""

    column: str
    values: tuple[str, ...]

    @property
    def kind(self) -> str:
        return "TEXT"


@dataclass(frozen=True, slots=True)
class Number:
    """A column of numbers, drawn evenly from `low` to `high` in steps of `step`; whole ones if `step` is."""

    column: str
    low: int
    high: int
    step: int | float = 1

    @property
    def kind(self) -> str:
        return "REAL" if isinstance(self.step, float) else "INT"


@dataclass(frozen=True, slots=True)
class Detail:
    """A second table with a row for each value of the domain's category column `key`: what `about` says of it."""

    table: str
    key: str
    about: Category | Number

    @property
    def schema(self) -> str:
        """`genres(genre TEXT, floor INT)`"""
        return f"{self.table}({self.key} TEXT, {self.about.column} {self.about.kind})"


@dataclass(frozen=True, slots=True)
class Domain:
    """A table and its detail. `plural` is what a question calls its rows; `names` are the values of its name column."""

    table: str
    singular: str
    plural: str
    name: str
    names: tuple[str, ...]
    categories: tuple[Category, Category]
    numbers: tuple[Number, Number]
    detail: Detail

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns in the order of the table, `id` first."""
        return ("id", self.name, *(c.column for c in self.categories), *(n.column for n in self.numbers))

    @property
    def schema(self) -> str:
        """The table as the prompt shows it: `books(id INT, title TEXT, genre TEXT, price INT, ...)`."""
        kinds = ("INT", "TEXT", *(column.kind for column in (*self.categories, *self.numbers)))
        columns = zip(self.columns, kinds, strict=True)
        return f"{self.table}({', '.join(f'{column} {kind}' for column, kind in columns)})"


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
        Detail("shelves", "genre", Number("floor", 1, 4)),
    ),
    Domain(
        "employees", "employee", "employees", "name", _PEOPLE,
        (Category("department", ("sales", "legal", "design", "finance", "support")), _CITIES),
        (Number("salary", 28000, 96000, 500), Number("age", 20, 64)),
        Detail("offices", "department", Category("building", ("East", "West", "Main"))),
    ),
    Domain(
        "songs", "song", "songs", "title", _TITLES,
        (
            Category("style", ("jazz", "rock", "folk", "soul", "techno")),
            Category("label", ("Bluebird", "Harvest", "Monsoon", "Parade")),
        ),
        (Number("seconds", 90, 480), Number("plays", 100, 9900, 50)),
        Detail("labels", "label", Category("country", ("France", "Kenya", "India"))),
    ),
    Domain(
        "cars", "car", "cars", "model", _BRANDS,
        (Category("fuel", ("petrol", "diesel", "electric", "hybrid")), _COLORS),
        (Number("price", 9000, 72000, 250), Number("mileage", 0, 180000, 500)),
        Detail("fuels", "fuel", Number("tax", 10, 40, 10)),
    ),
    Domain(
        "students", "student", "students", "name", _PEOPLE,
        (
            Category("major", ("biology", "physics", "music", "law", "chemistry")),
            Category("dorm", ("Maple", "Cedar", "Birch", "Willow")),
        ),
        (Number("score", 40, 100), Number("credits", 10, 180)),
        Detail("dorms", "dorm", Category("campus", ("north", "river", "hill"))),
    ),
    Domain(
        "recipes", "recipe", "recipes", "dish",
        _pairs("Spicy Sweet Smoky Creamy Crisp Baked", "Rice Soup Pie Beans Salad Fish"),
        (Category("cuisine", ("Thai", "Greek", "Mexican", "Italian", "Korean")), _SEASONS),
        (Number("minutes", 5, 120, 5), Number("calories", 90, 950, 10)),
        Detail("kitchens", "cuisine", Category("chef", ("Marta", "Oskar", "Pilar"))),
    ),
    Domain(
        "rivers", "river", "rivers", "name",
        _pairs("Stone Amber Swift Grey Twin Cold", "Run Fork Water Creek Bend Wash"),
        (_COUNTRIES, Category("climate", ("tropical", "arid", "temperate", "polar"))),
        (Number("length", 40, 6000, 20), Number("depth", 1, 90)),
        Detail("zones", "climate", Category("risk", ("low", "medium", "high"))),
    ),
    Domain(
        "laptops", "laptop", "laptops", "model", _BRANDS,
        (Category("brand", ("Acorn", "Zenith", "Kestrel", "Hexa")), _COLORS),
        (Number("price", 300, 3200, 20), Number("memory", 4, 64, 4)),
        Detail("brands", "brand", Number("warranty", 1, 4)),
    ),
    Domain(
        "hotels", "hotel", "hotels", "name", _PLACES,
        (_CITIES, Category("view", ("sea", "garden", "street", "mountain"))),
        (Number("rooms", 8, 400), Number("rate", 40, 520, 5)),
        Detail("views", "view", Number("surcharge", 10, 40, 10)),
    ),
    Domain(
        "plants", "plant", "plants", "name",
        _pairs("Dwarf Giant Wild Royal Desert Marsh", "Fern Lily Thistle Moss Orchid Sage"),
        (Category("soil", ("clay", "sand", "loam", "peat")), _SEASONS),
        (Number("height", 5, 300, 5), Number("price", 2, 80)),
        Detail("soils", "soil", Category("supplier", ("Agra", "Terrano", "Humus"))),
    ),
    Domain(
        "orders", "order", "orders", "customer", _PEOPLE,
        (
            Category("status", ("open", "paid", "shipped", "returned")),
            Category("method", ("card", "cash", "transfer", "voucher")),
        ),
        (Number("total", 10, 990, 5), Number("items", 1, 30)),
        Detail("methods", "method", Number("fee", 1, 4)),
    ),
    Domain(
        "trains", "train", "trains", "name",
        _pairs("Royal Coastal Alpine Night Valley Desert", "Arrow Star Express Comet Runner Link"),
        (
            Category("operator", ("Railia", "Transco", "Norda", "Velox")),
            Category("class", ("local", "regional", "express")),
        ),
        (Number("seats", 60, 900, 10), Number("speed", 70, 320, 5)),
        Detail("operators", "operator", Category("country", ("Norway", "Japan", "Canada"))),
    ),
    Domain(
        "movies", "movie", "movies", "title", _TITLES,
        (
            Category("mood", ("drama", "comedy", "thriller", "western")),
            Category("studio", ("Lumen", "Cascade", "Paragon", "Zoetrope", "Atlas")),
        ),
        (Number("minutes", 70, 210), Number("rating", 1, 10, 0.1)),
        Detail("studios", "studio", Category("country", ("France", "Brazil", "India"))),
    ),
    Domain(
        "dogs", "dog", "dogs", "name", _PEOPLE,
        (Category("breed", ("beagle", "poodle", "collie", "boxer", "husky")), _COLORS),
        (Number("age", 1, 15), Number("weight", 3, 60, 0.5)),
        Detail("breeds", "breed", Category("size", ("small", "medium", "large"))),
    ),
)  # fmt: skip

VALIDATION = (
    Domain(
        "ships", "ship", "ships", "name",
        _pairs("Proud Merry Iron Swift Lucky Northern", "Wave Gull Queen Wind Pearl Whale"),
        (
            Category("type", ("tanker", "ferry", "trawler", "yacht")),
            Category("harbor", ("Bergen", "Malta", "Osaka", "Dakar", "Perth")),
        ),
        (Number("tons", 100, 90000, 100), Number("crew", 2, 120)),
        Detail("harbors", "harbor", Category("coast", ("east", "west", "south"))),
    ),
    Domain(
        "wines", "wine", "wines", "name",
        _pairs("Castle Abbey Ruby Velvet Hill Monk", "Reserve Noble Estate Cuvee Select Vine"),
        (
            Category("grape", ("Merlot", "Syrah", "Riesling", "Malbec")),
            Category("region", ("Rioja", "Tuscany", "Mosel", "Mendoza", "Douro")),
        ),
        (Number("price", 6, 120), Number("rating", 1, 10, 0.1)),
        Detail("regions", "region", Category("climate", ("dry", "mild", "wet"))),
    ),
    Domain(
        "houses", "house", "houses", "owner", _PEOPLE,
        (
            Category("style", ("cottage", "villa", "loft", "bungalow")),
            Category("district", ("Harbor", "Oldtown", "Meadow", "Station")),
        ),
        (Number("rooms", 1, 14), Number("rent", 400, 4200, 20)),
        Detail("districts", "district", Number("zone", 1, 4)),
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
        Detail("airlines", "airline", Category("alliance", ("Unity", "Compass", "Zephyr"))),
    ),
    Domain(
        "players", "player", "players", "name", _PEOPLE,
        (
            Category("team", ("Falcons", "Bears", "Comets", "Sharks", "Wolves")),
            Category("position", ("goalkeeper", "defender", "midfielder", "striker")),
        ),
        (Number("goals", 0, 45), Number("age", 17, 39)),
        Detail("teams", "team", Category("league", ("first", "second", "third"))),
    ),
    Domain(
        "museums", "museum", "museums", "name", _PLACES,
        (_COUNTRIES, Category("theme", ("art", "science", "nature", "war", "design"))),
        (Number("visitors", 1000, 90000, 500), Number("fee", 0, 35, 0.5)),
        Detail("themes", "theme", Category("curator", ("Livia", "Ravi", "Selma"))),
    ),
    Domain(
        "phones", "phone", "phones", "model", _BRANDS,
        (Category("maker", ("Lyra", "Quanta", "Mirex", "Sonido")), Category("system", ("Nimbus", "Quartz", "Fjord"))),
        (Number("battery", 2000, 6000, 100), Number("weight", 110, 260, 2)),
        Detail("makers", "maker", Number("warranty", 1, 4)),
    ),
)  # fmt: skip
