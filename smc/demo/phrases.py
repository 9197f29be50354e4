"""Text templates of the demo problems: names, things, and sentences for each event of a story.

Templates are filled by `str.format` with `name`, `p` (she), `q` (her, as in "gives her"), `s` (her, as in "her box"),
`thing`, `extra` (a third person), `mate` (the person compared with) and the amounts `n` and `k`.
"""

PRONOUNS = {"f": ("she", "her", "her"), "m": ("he", "him", "his")}

NAMES = {
    "f": ("Mia", "Ana", "Lucy", "Nora", "Emma", "Zoe", "Ruth", "Ivy", "Clara", "Leila", "Rosa", "Grace", "Kate"),
    "m": ("Tom", "Ben", "Omar", "Leo", "Max", "Sam", "Ivan", "Hugo", "Paul", "Raj", "Finn", "Adam"),
}

THINGS = (
    "apples",
    "pears",
    "plums",
    "lemons",
    "eggs",
    "nuts",
    "cookies",
    "cakes",
    "candies",
    "marbles",
    "stickers",
    "stamps",
    "coins",
    "cards",
    "books",
    "pens",
    "pencils",
    "beads",
    "shells",
    "stones",
    "roses",
    "tulips",
    "balloons",
    "buttons",
    "tickets",
)

START = (
    "{name} has {n} {thing}.",
    "{name} starts with {n} {thing}.",
    "{name} owns {n} {thing}.",
    "There are {n} {thing} on the desk of {name}.",
)
START_BOXES = (
    "{name} has {k} boxes with {n} {thing} in each.",
    "{name} buys {k} bags of {n} {thing} each.",
    "{name} fills {k} jars with {n} {thing} each.",
)
GAIN = (
    "{p} buys {n} more.",
    "{p} finds {n} more.",
    "{extra} gives {q} {n} more.",
    "Then {p} gets {n} more from {extra}.",
    "The next day {p} buys {n} {thing}.",
    "{p} wins {n} {thing} in a game.",
)
LOSS = (
    "{p} gives {n} to {extra}.",
    "Then {p} loses {n} of them.",
    "{p} sells {n} of {s} {thing}.",
    "{extra} takes {n} of {s} {thing}.",
    "Later {p} gives {n} {thing} away.",
    "Then {p} drops {n} {thing} in the river.",
)
GAIN_BOXES = (
    "{p} buys {k} boxes of {n} {thing} each.",
    "{extra} brings {q} {k} bags with {n} {thing} in each.",
    "Then {p} finds {k} packs of {n}.",
)
LOSS_BOXES = (
    "{p} gives {n} {thing} to each of {k} friends.",
    "{p} sells {k} bags of {n} {thing} each.",
    "Then {p} loses {k} packs of {n}.",
)
DOUBLE = ("A week later {p} has twice as many.", "Then {p} doubles {s} {thing}.", "{extra} then doubles what {p} has.")
TIMES = (
    "A week later {p} has {k} times as many.",
    "By spring {p} has {k} times as many {thing}.",
    "Soon {p} has {k} times that number.",
)
HALVE = ("{p} gives half of them to {extra}.", "Then {p} loses half of {s} {thing}.", "{p} sells half of the {thing}.")
SPLIT = (
    "{p} sorts them into {k} equal piles and keeps one pile.",
    "{p} puts them in {k} equal boxes and keeps only one box.",
    "{p} splits them evenly among {k} jars and keeps one jar.",
)
MORE_THAN = ("{name} has {n} more {thing} than {mate}.", "{name} owns {n} more than {mate}.")
FEWER_THAN = ("{name} has {n} fewer {thing} than {mate}.", "{name} owns {n} fewer than {mate}.")
TWICE = ("{name} has twice as many {thing} as {mate}.", "{name} owns twice as many as {mate}.")
TIMES_AS = ("{name} has {k} times as many {thing} as {mate}.", "{name} owns {k} times as many as {mate}.")
HALF_AS = ("{name} has half as many {thing} as {mate}.", "{name} owns half as many as {mate}.")

ASK = (
    "How many {thing} does {name} have?",
    "How many {thing} does {name} have now?",
    "How many {thing} does {name} have in the end?",
    "How many does {p} have now?",
)
ASK_TOGETHER = (
    "How many {thing} do {name} and {mate} have together?",
    "How many {thing} do they have together?",
    "How many do they have in total?",
)
ASK_MORE = ("How many more {thing} does {name} have than {mate}?", "How many more does {name} have than {mate}?")
ASK_FEWER = ("How many fewer {thing} does {name} have than {mate}?", "How many fewer does {name} have than {mate}?")
ASK_PRICE = (
    "{p} sells all of them for {k} dollars each. How many dollars does {p} get?",
    "Each one costs {k} dollars. How many dollars are they all worth?",
)
ASK_PACK = (
    "{p} packs them in bags of {k}. How many bags does {p} need?",
    "{p} shares them equally among {k} children. How many does each child get?",
)
