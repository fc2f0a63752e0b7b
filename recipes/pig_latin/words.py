"""Pig latin: the rule, five hundred short common words, and how a word is shown to the model.

The rule: what a word opens with before its first vowel moves to the end, and "ay" follows; a word that opens with a
vowel gets "way". Vowels are a, e, i, o, u, and y wherever it is not the first letter; a u after q moves with it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from difflib import SequenceMatcher

OPENING = re.compile(r"y?(?:qu|[^aeiouy])*")

_LISTED = """
able about above acid act add after again age ago air all also animal answer any apple april area arm army art ask
aunt away baby back bad bag ball band bank bath bean bear bed bee bell best bike bird black blade blame blank blind
block blue board boat body bone book born bowl box boy brain brave bread break brick bridge bright bring broom brown
brush build bus busy buy cake call calm camp car card care cash cat chain chair chalk change cheap cheese chest
chicken child chin choose city clap class clean clear climb clock close cloth cloud clown coat cold color cook cool
corn cow crab cream cross crowd cry cup dance dark date day deep desk dinner dish doctor dog door down draw dream
dress drink drive drop drum dry duck dust each eagle ear early earth east easy eat egg eight empty end enemy engine
enjoy enter even every eye face fall family farm fast fat father field fight fire fish five flag flat floor flour
flower fly food foot forest fork fox free fresh friend frog fruit full fun game garden gate ghost gift girl give
glad glass globe glove goat gold good grape grass gray great green ground group grow hair half hand happy hat heart
help hen hill home honey hope horse hot house hunt ice idea inch ink inside iron island item jam job join joke judge
jump junior keep key kick kind king kiss kite knee knife lake lamp land large laugh leaf learn left lemon letter
light lion list live long look lost love lucky lunch magic make man map market mask meat milk mind mirror monkey
moon mother mouse mouth move music my nail name neck nest never new nice night nine noise north nose number ocean
odd off office oil old olive once onion only open orange order other our oven over owl own page paint paper park
party peace pencil pen phone piano pig place plain plane plant plate play please plum point pond pool post potato
pride prince print prize proud pull purple push queen quest quick quiet quite quiz race radio rain read red rest
rice rich ring river road rock roof room root rose round rule sad salt same sand save school screen sea seat seed
seven shade shape share sharp sheep shelf ship shirt shoe shop short show sing sister six skin sky sleep slide slow
small smart smell smile smoke snack snake snow soap soft song soup space spell spider spoon sport spring square
stair stamp stand star start stay step stick stone stop store storm story strange straw street string strong sugar
summer sun sweet swim swing table tail talk tall tea team test thank thick thin think three throw tiger time tired
today tomato tooth top town toy track train trap tree trick trip truck true try turn twelve twenty twin two ugly
uncle under until up upon us use valley van vest video village visit voice wagon walk wall warm wash watch water
wave way wear week west wet whale wheat wheel white who whole wide wife wild win wind wing winter wise wolf wood
word work world write wrong yard year yellow yes young your zebra zero zone zoo
"""
WORDS: tuple[str, ...] = tuple(_LISTED.split())


def pig_latin(word: str) -> str:
    """The word by the rule: book -> ookbay, string -> ingstray, apple -> appleway, queen -> eenquay, yes -> esyay."""
    opening = OPENING.match(word)
    moved = opening[0] if opening else ""
    return word[len(moved) :] + moved + "ay" if moved else word + "way"


def split(seed: int, held_out: int) -> tuple[list[str], list[str]]:
    """Words to train on and `held_out` others to be tested on, in the order that `seed` shuffles them to."""
    shuffled = random.Random(seed).sample(WORDS, len(WORDS))
    return shuffled[held_out:], shuffled[:held_out]


def prompt(word: str) -> str:
    """What the model reads. The letters stand apart: a model sees tokens, and to it ` book` is one, without letters."""
    return f"Word: {' '.join(word)}\nPig latin:"


def answer(word: str) -> str:
    """What it should write: letters apart again, and the end of the line as the sign to stop."""
    return f" {' '.join(pig_latin(word))}\n"


def read(written: str) -> str:
    """The word in what the model wrote: its first line without spaces."""
    return written.strip().partition("\n")[0].replace(" ", "")


def similarity(words: Sequence[str], wanted: Sequence[str]) -> float:
    """Mean over the pairs of the share of letters that agree in order, 0 to 1 (difflib's ratio)."""
    ratios = [SequenceMatcher(None, one, two).ratio() for one, two in zip(words, wanted, strict=True)]
    return sum(ratios) / len(ratios)
