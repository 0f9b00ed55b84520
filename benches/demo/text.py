"""What the three users send: prose of ours, made sentence by sentence, the same on every machine and of any length."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = ["STORIES", "SYSTEM", "Fact", "Story"]

_PAGE = 125  # sentences: prompts of the default length have fewer

# Several hundred tokens that all three prompts begin with: what is stored once.
SYSTEM = """You are the reading assistant of a small public archive. Readers send you long records: diaries, log books, letters,
minutes of meetings, lists of stores. You read each record from its first line to its last before you say anything about it.
You answer from the record alone. You do not add what you believe to be true of the world, and you do not guess at what the
writer may have meant. When a record says a thing twice in different words, you give the words that come first.

The archive keeps its records as they were written. Names are spelled as the writer spelled them, even where two pages of the
same hand disagree. Dates follow the calendar of the place. Measures are those of the trade: fathoms and cables at sea, chains
and furlongs on land, bushels in the granary, and the hour is the hour of the nearest church. You never convert them. If a page
is missing, the record says so in square brackets, and you leave the gap as it is.

Some of what the records hold was once private. The people who wrote it are long dead, and the archive has opened the boxes,
but you still treat them with courtesy. You quote sparingly and exactly. A phrase, a name, a number, an hour: these you copy
letter by letter. Long passages you leave to the reader, who has the record at hand. You do not praise the writer and you do
not blame him. You are patient with readers who ask the same thing more than once, and you give the same answer each time,
since the record has not changed in between.

Readers often finish a sentence that stands in the record, and wait for you to complete it. Then you go on in the record's own
words, from the place where the reader stopped, and you end with the sentence. You add no greeting, no remark and no question.
If the sentence does not stand in the record, you say that it does not.

The record follows.

"""


@dataclass(frozen=True)
class Fact:
    """A sentence near the beginning of a record, and the part of it that the model is to complete."""

    words: str
    needle: str

    @property
    def sentence(self) -> str:
        """The sentence as it stands in the record."""
        return f"{self.words} {self.needle}."


@dataclass(frozen=True)
class Story:
    """One user's record and the questions about it, one a turn."""

    name: str
    title: str
    facts: tuple[Fact, ...]
    turns: tuple[str, ...]
    templates: tuple[str, ...]
    words: dict[str, tuple[str, ...]] = field(hash=False)

    def opening(self) -> str:
        """What stands before the body: the title, a few sentences, and the facts."""
        return f"{self.title}\n\n{' '.join(self.sentences(4))} {self._facts()}\n\n"

    def body(self, sentences: int) -> str:
        """Make the record's body. A long record copies its facts again now and then: the small model forgets them else."""
        told = list(self.sentences(sentences))
        pages = [" ".join(told[at : at + _PAGE]).rstrip() for at in range(0, sentences, _PAGE)]
        return f"\n\nCopied from the first page: {self._facts()}\n\n".join(pages)

    def _facts(self) -> str:
        return " ".join(fact.sentence for fact in self.facts)

    def sentences(self, count: int) -> Iterator[str]:
        """Make the record's sentences, always the same ones in the same order."""
        chance = random.Random(self.name)
        for i in range(count):
            text = self.templates[int(chance.random() * len(self.templates))]
            for slot, choices in self.words.items():
                while "{" + slot + "}" in text:
                    text = text.replace("{" + slot + "}", choices[int(chance.random() * len(choices))], 1)
            text = text.replace("{n}", str(2 + int(chance.random() * 57)))
            yield text + ("\n\n" if i % 7 == 6 else "")

    def ending(self, turn: int) -> str:
        """What the user adds in a turn (1 is the first): a remark, and then the beginning of a sentence of the record."""
        return f"\n\n{self.turns[turn - 1]}\n\n{self.facts[turn - 1].words}"


_LIGHTHOUSE = Story(
    name="lighthouse",
    title="LOG OF THE LIGHT AT GANNET ROCK",
    facts=(
        Fact("The pass phrase of the lighthouse keeper is", "silver walnut"),
        Fact("The boat of the lighthouse keeper is named", "Merry Heron"),
        Fact("The spare key of the lamp room hangs behind the", "copper barometer"),
        Fact("The dog of the lighthouse keeper is named", "Admiral Biscuit"),
    ),
    turns=(
        "The reader asks for the keeper's own words.",
        "Thank you. Another reader now asks about the boat, and wants the name as it is painted on the bow.",
        "That agrees with the harbour list. One thing more, about the key, since the lamp room was found locked last week.",
        "Good. The last question for today comes from a child, who has read all of the log and wants to know about the dog.",
    ),
    templates=(
        "Wind {wind}, {force}, and the {sea} came over the {place} until the {hour}.",
        "{who} trimmed the {thing} and found {n} drops of oil spilled by the {place}.",
        "At the {hour} a {ship} passed to the {wind}, and {who} counted {n} men on her deck.",
        "The {thing} was cleaned with {stuff}, which took {who} until the {hour}.",
        "{who} wrote to the harbour for {n} pounds of {stuff}, and the letter went with the {ship}.",
        "No {ship} was seen all day, only {n} birds on the {place} and the {sea} beyond it.",
        "We ate {food} by the {place}, because the kitchen chimney would not draw with the wind {wind}.",
        "The {sea} took away the ladder below the {place}, and {who} made it new out of {n} planks.",
        "{who} says that the {thing} needs {stuff} before winter; I have put it in the list.",
        "Before the {hour} the fog lay so thick on the {place} that the bell was rung {n} times.",
        "A {ship} lay under the {place} with a broken spar, and we gave her {stuff} and {food}.",
        "I read the glass at the {hour}: it had fallen, and by night the wind was {wind} and {force}.",
        "The relief brought {food}, {stuff} and {n} letters, none of them for {who}.",
        "{who} found a gull asleep inside the {thing}, and carried it down to the {place} in his cap.",
    ),
    words={
        "wind": ("north-west", "south", "east by north", "west", "south-west", "north"),
        "force": ("fresh", "light and baffling", "a whole gale", "moderate", "squally", "dying toward evening"),
        "sea": ("swell", "spray", "ebb", "green water", "tide", "surf"),
        "place": ("landing stage", "gallery", "lower rock", "coal store", "east window", "boat slip"),
        "hour": ("second bell", "noon", "first watch", "turn of the tide", "dog watch", "hour of prayer"),
        "who": ("Old Tamsin", "the assistant", "Mr. Penhallow", "young Davy", "the carpenter", "my brother"),
        "thing": ("great lens", "clockwork", "fog bell", "weather vane", "spare lamp", "signal chest"),
        "ship": ("herring drifter", "collier", "revenue cutter", "French lugger", "pilot boat", "barque"),
        "stuff": ("whiting", "lamp oil", "tarred rope", "chamois leather", "white lead", "coal"),
        "food": ("salt pork", "oatmeal", "boiled eggs", "barley bread", "dried peas", "a goose"),
    },
)

_OBSERVATORY = Story(
    name="observatory",
    title="DAY BOOK OF THE HILL OBSERVATORY",
    facts=(
        Fact("The secret word of the chief astronomer is", "crimson lantern"),
        Fact("The favourite tea of the chief astronomer is", "smoked juniper"),
        Fact("The lost notebook of the chief astronomer was bound in", "yellow sailcloth"),
        Fact("The old telescope was paid for by a merchant named", "Barnabas Quill"),
    ),
    turns=(
        "A visitor has asked for the word at the gate.",
        "Many thanks. The cook would like to know something else, because guests are expected on Sunday evening.",
        "That will do for the cook. The librarian is still searching the shelves and asks how to recognise the notebook.",
        "Found, under the stairs. Now the treasurer is writing the history of the house and needs one name from the day book.",
    ),
    templates=(
        "The sky was {sky} until the {hour}, and {who} measured {n} stars in {place}.",
        "{who} complains that the {thing} drifts by {n} seconds in a night, more when it is {sky}.",
        "A letter came from {town} with tables of {subject}, which {who} has begun to copy.",
        "We opened the dome at the {hour}, but the {thing} was wet and {who} sent us to bed.",
        "{who} lectured on {subject} to {n} guests from {town}, who admired the {thing}.",
        "The comet stood near {place}, {sky}, and its tail was {n} times as long as the Moon is wide.",
        "New mercury for the {thing} arrived from {town}; the bottle was short by {n} grains.",
        "{who} and the apprentice disagree about {subject}; both have left notes on the {thing}.",
        "Snow lay on the shutters, and {who} swept them before the {hour} with a broom from {town}.",
        "I have compared the {thing} with the signal from {town}: it gains {n} hundredths a day.",
        "Nothing was seen in {place} but a faint glow, which {who} takes for {subject}.",
        "The rain gauge held {n} lines, and the {thing} was oiled while it stayed {sky}.",
        "A boy from {town} asked whether {subject} can be seen by day; {who} showed him Venus.",
        "At the {hour} the {thing} struck by itself, which {who} could not explain.",
    ),
    words={
        "sky": ("clear", "hazy", "covered", "clear but trembling", "broken by clouds", "very dark"),
        "hour": ("eleventh hour", "setting of the Moon", "evening bell", "third hour", "end of twilight", "change of watch"),
        "who": ("Miss Aldous", "the apprentice", "Dr. Veith", "the instrument maker", "Brother Anselm", "the computer"),
        "place": ("the Swan", "the belt of Orion", "Cassiopeia", "the tail of the Bear", "the Lyre", "the southern Fish"),
        "thing": ("transit clock", "meridian circle", "dome wheel", "heliometer", "barograph", "zenith tube"),
        "town": ("Uppsala", "the capital", "Padua", "Greenwich", "the valley", "Dorpat"),
        "subject": ("refraction", "the zodiacal light", "double stars", "the motion of the pole", "eclipses", "sunspots"),
    },
)

_RAILWAY = Story(
    name="railway",
    title="NOTES OF THE STATION MASTER AT HIGH PASS",
    facts=(
        Fact("The code word of the mountain railway is", "velvet anchor"),
        Fact("The first engine of the mountain railway was named", "Iron Clementine"),
        Fact("The strong box of the mountain railway lies under a", "crooked larch"),
        Fact("The favourite dish of the mountain railway is", "mushroom dumplings"),
    ),
    turns=(
        "The inspector wants the word before he signs.",
        "He has signed. His clerk, who collects such things, now asks how the oldest of the engines was called.",
        "The clerk is content. There is a matter of money left: the council wishes to know where the box was put.",
        "So it will be dug up in spring. Before they leave, the council would like to eat, and asks what to order here.",
    ),
    templates=(
        "The {train} came {late}, with {n} wagons of {goods} and {who} on the footplate.",
        "{who} cleared the {part} of snow as far as the {place}, and found it {state}.",
        "We loaded {n} sacks of {goods} for the {train}, and sealed the doors at the {place}.",
        "A stone as large as a barrel fell by the {place}; {who} stopped the {train} with a lantern.",
        "{who} reports the {part} {state}, and asks for {n} bolts and a man to help.",
        "The telegraph was silent until the {train} had gone; then it gave {n} words about {goods}.",
        "Passengers: {n}, among them {who} and a lady with {goods} in a basket.",
        "The water at the {place} froze, so the {train} took hers from the brook, {late}.",
        "I paid {who} for {n} hours at the {part}, which is {state} again.",
        "The {train} left two wagons of {goods} behind, since the {part} was {state}.",
        "{who} slept at the {place}, because of the storm, and walked down with the mail, {late}.",
        "An avalanche closed the line below the {place}; {n} men dug, and the {train} passed {late}.",
        "The {part} was painted, and the smell of it drove {who} out to the {place}.",
        "Sold {n} tickets; {goods} were asked for, but the {train} had brought none.",
    ),
    words={
        "train": ("morning train", "goods train", "mail train", "ballast train", "night train", "special"),
        "late": ("an hour late", "to the minute", "before its time", "after dark", "late as ever", "at the second whistle"),
        "goods": ("slate", "cheese", "timber", "salt", "copper ore", "wool", "lamp glass"),
        "who": ("Josef", "the widow Arnaud", "the platelayer", "engine driver Moll", "my nephew", "the postman"),
        "part": ("turntable", "rack rail", "signal wire", "snow shed", "water crane", "points at the siding"),
        "place": ("upper tunnel", "stone bridge", "chapel", "gravel pit", "summit post", "goods shed"),
        "state": ("sound", "bent", "worn thin", "stiff with frost", "better than last year", "out of true"),
    },
)

STORIES = (_LIGHTHOUSE, _OBSERVATORY, _RAILWAY)
