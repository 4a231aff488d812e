"""The words that a prompt may use, and all prompts made of them."""

from dataclasses import dataclass

RGB = tuple[int, int, int]

OBJECTS: dict[str, str] = {
    "cat": "🐱",
    "dog": "🐶",
    "fox": "🦊",
    "panda": "🐼",
    "lion": "🦁",
    "frog": "🐸",
    "pig": "🐷",
    "owl": "🦉",
    "penguin": "🐧",
    "fish": "🐠",
    "whale": "🐳",
    "octopus": "🐙",
    "butterfly": "🦋",
    "turtle": "🐢",
    "sunflower": "🌻",
    "rose": "🌹",
    "cactus": "🌵",
    "tree": "🌳",
    "mushroom": "🍄",
    "apple": "🍎",
    "banana": "🍌",
    "strawberry": "🍓",
    "pizza": "🍕",
    "burger": "🍔",
    "cupcake": "🧁",
    "rocket": "🚀",
    "car": "🚗",
    "bus": "🚌",
    "house": "🏠",
    "sailboat": "⛵",
    "balloon": "🎈",
    "umbrella": "☂",
    "crown": "👑",
    "guitar": "🎸",
    "robot": "🤖",
    "ghost": "👻",
    "snowman": "⛄",
    "pumpkin": "🎃",
}

SHAPES = ("circle", "square", "triangle", "star", "heart", "ring", "diamond", "cross")

COLOURS: dict[str, RGB] = {
    "red": (222, 40, 40),
    "orange": (250, 140, 20),
    "yellow": (250, 215, 40),
    "green": (40, 160, 70),
    "blue": (35, 90, 215),
    "purple": (135, 55, 180),
    "white": (250, 250, 250),
    "black": (25, 25, 25),
}

BACKGROUNDS: dict[str, RGB] = {
    "white": (250, 250, 250),
    "black": (25, 25, 25),
    "red": (225, 85, 80),
    "yellow": (252, 225, 110),
    "green": (125, 200, 125),
    "blue": (95, 155, 240),
    "pink": (250, 175, 205),
    "gray": (160, 160, 165),
}

FUNCTION_WORDS = ("a", "an", "on", "background", "the", "of", "in", "and", "with", "style")


@dataclass(frozen=True)
class Subject:
    """What a prompt asks for; `colour` is empty for an object, which has its own colours."""

    thing: str
    background: str
    colour: str = ""

    def prompt(self) -> str:
        """The one sentence that training pairs with this subject."""
        words = f"{self.colour} {self.thing}".strip()
        article = "an" if words[0] in "aeiou" else "a"
        return f"{article} {words} on a {self.background} background"


def object_subjects() -> list[Subject]:
    """Every object on every background."""
    return [Subject(thing, background) for thing in OBJECTS for background in BACKGROUNDS]


def shape_subjects() -> list[Subject]:
    """Every shape in every colour on every background, except a colour on its own background."""
    return [
        Subject(shape, background, colour)
        for shape in SHAPES
        for colour in COLOURS
        for background in BACKGROUNDS
        if colour != background
    ]


def words() -> list[str]:
    """Every word that the tokenizers know, in a fixed order; all others become the unknown token."""
    return list(dict.fromkeys([*FUNCTION_WORDS, *COLOURS, *BACKGROUNDS, *SHAPES, *OBJECTS]))
