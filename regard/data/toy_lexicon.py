"""The words of the toy corpus and their forms: nouns, adjectives, verbs, pronouns, prepositions and times.

A noun belongs to classes ("fruit", "person", ...); adjectives, verbs and prepositions name the classes of nouns that they
go with, so that people eat apples and repair cars and not the reverse.
"""

from dataclasses import dataclass

CASES = ("nom", "acc", "dat")


@dataclass(frozen=True)
class Noun:
    """A noun; without English plural it is used in the singular only."""

    english: str
    english_plural: str
    gender: str  # m, f, n
    german: str
    german_plural: str
    classes: str
    oblique: str = ""  # accusative and dative of the weak masculines: der Junge, den Jungen

    def has(self, *names: str) -> bool:
        return any(name in self.classes.split() for name in names)

    @property
    def proper(self) -> bool:
        return self.has("name", "city")

    def form(self, case: str, plural: bool) -> str:
        """Return the German form; the dative plural adds an n, unless it ends in n or s (den Kindern, den Autos)."""
        if plural:
            return self.german_plural + ("n" if case == "dat" and self.german_plural[-1] not in "ns" else "")
        return self.oblique if self.oblique and case != "nom" else self.german


@dataclass(frozen=True)
class Adjective:
    """An adjective, with the classes of nouns that it can describe."""

    english: str
    german: str
    classes: str
    irregular_stem: str = ""  # teuer -> ein teures Auto

    @property
    def stem(self) -> str:
        return self.irregular_stem or self.german


@dataclass(frozen=True)
class Verb:
    """A verb; without -ing form it has no present here, because English would not say *she is seeing the dog*."""

    base: str
    past: str
    ing: str
    infinitive: str  # without the separable prefix
    du: str
    er: str
    participle: str
    objects: str = ""  # noun classes of the object; none: intransitive
    prefix: str = ""  # aufmachen: sie macht ... auf, ... aufgemacht, weil sie ... aufmacht
    aux: str = "haben"
    case: str = "acc"  # of the object: sie hilft dem Mann
    gift: bool = False  # takes a dative recipient
    complement: str = ""  # kinds of prepositional phrase of which it needs one
    adjuncts: str = ""  # kinds of prepositional phrase of which it may have one


@dataclass(frozen=True)
class Pronoun:
    """A personal pronoun, used in place of a noun phrase."""

    subject: str
    object: str
    person: int  # 0 ich, 1 du, 2 er/sie/es, 3 wir, 4 sie (plural): the index into every conjugation table
    nom: str
    acc: str
    dat: str
    indefinite = False

    def english(self, negated: bool = False) -> str:
        return self.object

    def german(self, case: str, negated: bool = False) -> str:
        return {"nom": self.nom, "acc": self.acc, "dat": self.dat}[case]


@dataclass(frozen=True)
class Preposition:
    """A preposition, with the German case that it takes."""

    english: str
    german: str
    case: str
    classes: str  # of the nouns it takes


@dataclass(frozen=True)
class Time:
    """A phrase of time, with the tenses that it fits."""

    english: str
    german: str
    tenses: str


NOUNS = (
    Noun("man", "men", "m", "Mann", "Männer", "person adult"),
    Noun("woman", "women", "f", "Frau", "Frauen", "person adult"),
    Noun("child", "children", "n", "Kind", "Kinder", "person little own"),
    Noun("boy", "boys", "m", "Junge", "Jungen", "person little", "Jungen"),
    Noun("girl", "girls", "n", "Mädchen", "Mädchen", "person little"),
    Noun("teacher", "teachers", "m", "Lehrer", "Lehrer", "person adult own"),
    Noun("doctor", "doctors", "m", "Arzt", "Ärzte", "person adult own"),
    Noun("friend", "friends", "m", "Freund", "Freunde", "person adult own"),
    Noun("mother", "", "f", "Mutter", "", "kin"),
    Noun("father", "", "m", "Vater", "", "kin"),
    Noun("sister", "sisters", "f", "Schwester", "Schwestern", "kin"),
    Noun("brother", "brothers", "m", "Bruder", "Brüder", "kin"),
    Noun("Anna", "", "f", "Anna", "", "name"),
    Noun("Peter", "", "m", "Peter", "", "name"),
    Noun("dog", "dogs", "m", "Hund", "Hunde", "animal"),
    Noun("cat", "cats", "f", "Katze", "Katzen", "animal"),
    Noun("apple", "apples", "m", "Apfel", "Äpfel", "fruit"),
    Noun("pear", "pears", "f", "Birne", "Birnen", "fruit"),
    Noun("tomato", "tomatoes", "f", "Tomate", "Tomaten", "fruit"),
    Noun("cake", "cakes", "m", "Kuchen", "Kuchen", "dish"),
    Noun("potato", "potatoes", "f", "Kartoffel", "Kartoffeln", "dish cooked"),
    Noun("egg", "eggs", "n", "Ei", "Eier", "dish cooked"),
    Noun("bread", "", "n", "Brot", "", "mass staple"),
    Noun("cheese", "", "m", "Käse", "", "mass staple"),
    Noun("soup", "", "f", "Suppe", "", "mass staple liquid cooked"),
    Noun("rice", "", "m", "Reis", "", "mass staple cooked"),
    Noun("water", "", "n", "Wasser", "", "mass drink liquid"),
    Noun("coffee", "", "m", "Kaffee", "", "mass drink liquid"),
    Noun("tea", "", "m", "Tee", "", "mass drink liquid"),
    Noun("milk", "", "f", "Milch", "", "mass drink liquid"),
    Noun("book", "books", "n", "Buch", "Bücher", "reading text volume colored"),
    Noun("letter", "letters", "m", "Brief", "Briefe", "reading text written"),
    Noun("story", "stories", "f", "Geschichte", "Geschichten", "text written"),
    Noun("newspaper", "newspapers", "f", "Zeitung", "Zeitungen", "reading volume"),
    Noun("coat", "coats", "m", "Mantel", "Mäntel", "clothing"),
    Noun("jacket", "jackets", "f", "Jacke", "Jacken", "clothing"),
    Noun("shirt", "shirts", "n", "Hemd", "Hemden", "clothing"),
    Noun("key", "keys", "m", "Schlüssel", "Schlüssel", "key"),
    Noun("car", "cars", "n", "Auto", "Autos", "vehicle"),
    Noun("bicycle", "bicycles", "n", "Fahrrad", "Fahrräder", "vehicle"),
    Noun("door", "doors", "f", "Tür", "Türen", "opening"),
    Noun("window", "windows", "n", "Fenster", "Fenster", "opening"),
    Noun("table", "", "m", "Tisch", "", "furniture top"),
    Noun("chair", "", "m", "Stuhl", "", "furniture seat"),
    Noun("bench", "", "f", "Bank", "", "furniture seat top"),
    Noun("bed", "", "n", "Bett", "", "furniture seat"),
    Noun("garden", "", "m", "Garten", "", "place own"),
    Noun("house", "", "n", "Haus", "", "place own"),
    Noun("kitchen", "", "f", "Küche", "", "place own"),
    Noun("park", "", "m", "Park", "", "place"),
    Noun("school", "", "f", "Schule", "", "place"),
    Noun("hotel", "", "n", "Hotel", "", "place"),
    Noun("Berlin", "", "n", "Berlin", "", "city"),
    Noun("Vienna", "", "n", "Wien", "", "city"),
)

ADJECTIVES = (
    Adjective("old", "alt", "adult animal volume clothing key vehicle opening furniture place"),
    Adjective("young", "jung", "adult animal"),
    Adjective("small", "klein", "little animal fruit dish key vehicle opening furniture place"),
    Adjective("big", "groß", "animal fruit dish vehicle opening furniture place"),
    Adjective("new", "neu", "text reading clothing key vehicle furniture"),
    Adjective("red", "rot", "fruit colored clothing vehicle opening"),
    Adjective("green", "grün", "fruit colored clothing vehicle opening"),
    Adjective("black", "schwarz", "animal clothing vehicle"),
    Adjective("white", "weiß", "animal clothing vehicle opening furniture"),
    Adjective("beautiful", "schön", "animal text clothing place"),
    Adjective("expensive", "teuer", "clothing vehicle furniture staple", "teur"),
    Adjective("good", "gut", "dish staple drink text"),
    Adjective("fresh", "frisch", "fruit dish staple drink"),
    Adjective("cold", "kalt", "liquid weather"),
    Adjective("warm", "warm", "liquid clothing weather"),
    Adjective("tired", "müde", "person kin animal state", "müd"),
    Adjective("hungry", "hungrig", "person animal state"),
    Adjective("sick", "krank", "person kin animal state"),
    Adjective("happy", "glücklich", "person kin state"),
    Adjective("sad", "traurig", "person kin state"),
)

_PEOPLE = "person kin name"
_GOODS = "fruit dish staple drink reading clothing furniture vehicle key"
_TO_BRING = "fruit dish drink reading"
_TO_REPAIR = "vehicle opening furniture"
_TO_SHOW = "reading clothing vehicle animal"

VERBS = (
    Verb("eat", "ate", "eating", "essen", "isst", "isst", "gegessen", "fruit dish staple", adjuncts="in with"),
    Verb("drink", "drank", "drinking", "trinken", "trinkst", "trinkt", "getrunken", "drink", adjuncts="in with"),
    Verb("cook", "cooked", "cooking", "kochen", "kochst", "kocht", "gekocht", "cooked", adjuncts="in with for"),
    Verb("buy", "bought", "buying", "kaufen", "kaufst", "kauft", "gekauft", _GOODS, adjuncts="for town"),
    Verb("read", "read", "reading", "lesen", "liest", "liest", "gelesen", "reading text", adjuncts="in"),
    Verb(
        "write", "wrote", "writing", "schreiben", "schreibst", "schreibt", "geschrieben", "written", adjuncts="in for"
    ),
    Verb("wash", "washed", "washing", "waschen", "wäschst", "wäscht", "gewaschen", "fruit clothing vehicle"),
    Verb("repair", "repaired", "repairing", "reparieren", "reparierst", "repariert", "repariert", _TO_REPAIR),
    Verb("open", "opened", "opening", "machen", "machst", "macht", "aufgemacht", "opening", "auf"),
    Verb("close", "closed", "closing", "machen", "machst", "macht", "zugemacht", "opening", "zu"),
    Verb("bring", "brought", "bringing", "bringen", "bringst", "bringt", "mitgebracht", _TO_BRING, "mit"),
    Verb("see", "saw", "", "sehen", "siehst", "sieht", "gesehen", "vehicle animal " + _PEOPLE, adjuncts="in"),
    Verb("find", "found", "", "finden", "findest", "findet", "gefunden", "reading clothing key animal", adjuncts="in"),
    Verb("visit", "visited", "visiting", "besuchen", "besuchst", "besucht", "besucht", _PEOPLE),
    Verb("invite", "invited", "inviting", "laden", "lädst", "lädt", "eingeladen", _PEOPLE, "ein"),
    Verb("call", "called", "calling", "rufen", "rufst", "ruft", "angerufen", _PEOPLE, "an"),
    Verb("help", "helped", "helping", "helfen", "hilfst", "hilft", "geholfen", _PEOPLE, case="dat", adjuncts="in"),
    Verb("thank", "thanked", "thanking", "danken", "dankst", "dankt", "gedankt", _PEOPLE, case="dat"),
    Verb("give", "gave", "giving", "geben", "gibst", "gibt", "gegeben", _TO_BRING + " clothing key", gift=True),
    Verb("show", "showed", "showing", "zeigen", "zeigst", "zeigt", "gezeigt", _TO_SHOW, gift=True),
    Verb("put", "put", "putting", "legen", "legst", "legt", "gelegt", "reading clothing key", complement="onto"),
    Verb("sleep", "slept", "sleeping", "schlafen", "schläfst", "schläft", "geschlafen", adjuncts="in"),
    Verb("play", "played", "playing", "spielen", "spielst", "spielt", "gespielt", adjuncts="in with"),
    Verb("work", "worked", "working", "arbeiten", "arbeitest", "arbeitet", "gearbeitet", adjuncts="in town with for"),
    Verb("sit", "sat", "sitting", "sitzen", "sitzt", "sitzt", "gesessen", complement="seat"),
    Verb("wait", "waited", "waiting", "warten", "wartest", "wartet", "gewartet", complement="await"),
    Verb("go", "went", "going", "gehen", "gehst", "geht", "gegangen", complement="into to", aux="sein"),
    Verb("come", "came", "coming", "kommen", "kommst", "kommt", "gekommen", complement="into out to", aux="sein"),
    Verb("run", "ran", "running", "laufen", "läufst", "läuft", "gelaufen", complement="into out", aux="sein"),
    Verb("drive", "drove", "driving", "fahren", "fährst", "fährt", "gefahren", complement="city to", aux="sein"),
    Verb("stay", "stayed", "staying", "bleiben", "bleibst", "bleibt", "geblieben", complement="in town", aux="sein"),
    Verb("come back", "came back", "coming back", "kommen", "kommst", "kommt", "zurückgekommen", "", "zurück", "sein"),
)
ANIMALS_DO = ("sleep", "play", "sit", "wait", "go", "come", "run", "stay", "come back")
BE = Verb("be", "was", "being", "sein", "bist", "ist", "gewesen", aux="sein")
RAIN = Verb("rain", "rained", "raining", "regnen", "regnest", "regnet", "geregnet", adjuncts="town")
REPORTS = (  # verbs with a that-clause
    Verb("say", "said", "", "sagen", "sagst", "sagt", "gesagt"),
    Verb("hear", "heard", "", "hören", "hörst", "hört", "gehört"),
)

PRONOUNS = (
    Pronoun("I", "me", 0, "ich", "mich", "mir"),
    Pronoun("you", "you", 1, "du", "dich", "dir"),
    Pronoun("he", "him", 2, "er", "ihn", "ihm"),
    Pronoun("she", "her", 2, "sie", "sie", "ihr"),
    Pronoun("we", "us", 3, "wir", "uns", "uns"),
    Pronoun("they", "them", 4, "sie", "sie", "ihnen"),
)
IT = Pronoun("it", "it", 2, "es", "es", "ihm")  # only the weather's it, which is always es

POSSESSIVES = {"my": "mein", "your": "dein", "his": "sein", "her": "ihr", "our": "unser", "their": "ihr"}

PREPOSITIONS = {
    "in": Preposition("in", "in", "dat", "place"),
    "town": Preposition("in", "in", "dat", "city"),
    "into": Preposition("into", "in", "acc", "place"),
    "out": Preposition("out of", "aus", "dat", "place"),
    "on": Preposition("on", "auf", "dat", "top"),
    "seat": Preposition("on", "auf", "dat", "seat"),
    "onto": Preposition("on", "auf", "acc", "furniture"),
    "with": Preposition("with", "mit", "dat", _PEOPLE),
    "for": Preposition("for", "für", "acc", _PEOPLE),
    "await": Preposition("for", "auf", "acc", _PEOPLE),
    "to": Preposition("to", "zu", "dat", _PEOPLE),
    "city": Preposition("to", "nach", "dat", "city"),
}

TIMES = (
    Time("yesterday", "gestern", "past"),
    Time("this morning", "heute Morgen", "past"),
    Time("last week", "letzte Woche", "past"),
    Time("on Monday", "am Montag", "past will"),
    Time("today", "heute", "past present will can must"),
    Time("now", "jetzt", "present can must"),
    Time("tomorrow", "morgen", "will can must"),
    Time("next week", "nächste Woche", "will can must"),
)
