"""The grammar that writes the training text, and counts exactly how surprising it is.

    python weights/grammar.py        # prints a few documents of every family

All text is invented here, from the word lists and templates below, so the models of this folder need no
data set, no download and no licence note. Every random choice goes through Dice, which adds up entropy:
it is known how much there is to learn, and the trainer can say that the model has learnt it.
"""
import json
import math
import random
import re

WORDS = {  # {adj} in a template picks one of these afresh; {Adj} picks once a document and is then kept
    "girl": "Mia Anna Lily Zoe Emma Ruby Nora Ivy Clara Rosa Ella June Tess Maya Alice Sara Lucy Eva",
    "boy": "Tom Ben Max Sam Leo Finn Jack Omar Hugo Noah Eli Paul Theo Ravi David Peter Oscar Ali",
    "animal": "cat dog fox bear rabbit mouse frog duck owl turtle pony lamb hen goat dragon squirrel",
    "adj": "small big happy kind brave quiet clever hungry sleepy old young funny gentle shy",
    "virtue": "kind brave loyal patient gentle careful friendly helpful",
    "colour": "red blue green yellow white black brown pink golden silver",
    "thing": "ball hat kite boat book lamp key drum cup bell box map coin spoon shoe ring",
    "food": "cake bread soup pie cheese honey rice jam fruit milk salad pasta",
    "place": "garden forest park kitchen village market barn field cave school castle library",
    "weather": "sunny rainy windy cold warm snowy cloudy foggy",
    "time": "morning afternoon evening day night",
    "feel": "happy tired proud surprised excited calm",
    "bad": "sad scared lonely angry worried",
    "city": "Paris London Rome Cairo Oslo Lima Delhi Tokyo Madrid Berlin Boston Dublin",
    "job": "teacher baker farmer doctor sailor painter driver singer cook builder",
    "moved": "jumped ran walked danced hurried climbed skipped crept",
    "travel": "walk run go ride sail drive",
    "noun": "item user price name count word line score value node file task page order color point",
    "verb": "get find load make check update print read",
    "day": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "ingredient": "flour milk butter sugar salt rice water oil corn honey",
    "digit": "1 2 3 4 5 6 7 8 9",
}
WORDS = {kind: words.split() for kind, words in WORDS.items()}
WORDS["helper"] = WORDS["animal"]
PRONOUNS = {"he": ("he", "she"), "He": ("He", "She"), "him": ("him", "her"), "his": ("his", "her"),
            "His": ("His", "Her")}

OPENINGS = [
    "Once upon a time, there was a {adj} {Animal} named {hero}.",
    "One {weather} {time}, a {adj} {Animal} named {hero} went to the {Place}.",
    "{hero} was a {adj} {Animal} who lived near the {Place}.",
    "There was once a {adj} {Animal} called {hero}.",
    "On a {weather} {day}, {hero} the {Animal} woke up early.",
    "Far away in {city}, a {adj} {Animal} named {hero} was looking for a friend.",
    "Every {time}, {hero} the {Animal} {moved} to the {Place}.",
    "Long ago, a {adj} {Animal} named {hero} lived in a {colour} house by the {Place}.",
    "{hero} the {Animal} and a {adj} {job} lived together in {city}."]
TREASURES = [
    "{He} had a {Colour} {Thing}, and {he} loved it very much.",
    "{He} always carried a {Colour} {Thing}.",
    "A {job} had given {him} a {Colour} {Thing}.",
    "The best thing {he} had was a {Colour} {Thing}.",
    "{He} found a {Colour} {Thing} in the {Place} and took it home."]
SCENES = [
    "{He} {moved} down to the {place} and looked around.",
    "It was {weather}, so {he} stayed in the {Place} for a while.",
    "\"I want some {food},\" said {hero}.",
    "{He} saw a {adj} {animal} sitting by the {place}.",
    "A {adj} {animal} said, \"Hello, {hero}! Where are you going?\"\n"
    "\"I am going to the {Place},\" said {hero}.",
    "{He} met a {job} who gave {him} some {food} and some {food}.",
    "There was a {things} on the table.",
    "{hero} liked to eat {food} in the {time}.",
    "\"This is the best {Thing} in the whole {Place},\" {he} said.",
    "{He} put the {Thing} next to a {things}.",
    "{hero} sang a song about a {adj} {animal}.",
    "The {Animal} felt {feel}, because it was a {weather} {day}."]
HELPERS = [
    "Then {friend} the {Helper} came by. \"What is wrong?\" asked {friend}.\n"
    "\"It is about my {Colour} {Thing},\" said {hero}.\n"
    "\"Do not worry,\" said {friend}. \"I will help you.\"",
    "\"Can you help me?\" {hero} asked {friend} the {Helper}. \"Of course I can,\" said {friend}.",
    "{friend}, a {adj} {Helper}, heard the noise and {moved} over. \"I can help,\" {f_he} said.",
    "{He} told {friend} the {Helper} about it, and {f_he} had a plan."]
PLOTS = [  # what goes wrong, and what can put it right again
    (["But then {he} lost the {Thing}.", "Suddenly, the {Thing} was gone! {hero} felt very {bad}.",
      "One {time}, {he} could not find the {Thing} anywhere. {He} began to cry."],
     ["They looked in the {place} and found the {Thing} behind a {colour} {thing}.",
      "At last, {friend} saw the {Thing} next to a {thing}.",
      "They asked a {job}, who had seen the {Thing} in the {place}."]),
    (["But then the {Thing} fell into a deep hole and {he} felt {bad}.",
      "But the {Thing} was stuck under a big stone, and {hero} could not lift it."],
     ["Together they pulled and pulled until the {Thing} came out.",
      "First they found a {thing}, then they used it to get the {Thing} out.",
      "\"Try again,\" said {friend}, and this time {hero} did it."]),
    (["Then it began to rain, and the {Thing} broke. \"Oh no!\" said {hero}.",
      "One {time}, {hero} fell down and the {Thing} broke. {He} felt very {bad}."],
     ["They took it to a {job}, who made the {Thing} as good as new.",
      "{friend} gave {hero} a new {Thing}. It was {colour} and shiny.",
      "All {time} long they worked, and then the {Thing} was whole again."]),
    (["A {adj} {animal} took the {Thing} and {moved} away.",
      "In the {time}, a {animal} came and took the {Thing}. {hero} felt {bad}."],
     ["They {moved} after the thief, who said sorry and gave the {Thing} back.",
      "They gave the thief some {food} and got the {Thing} back."])]
ENDINGS = [
    "{hero} and {friend} shared some {food} and became best friends.",
    "From that day on, {hero} and {friend} played together every {time}.",
    "{hero} thanked {friend} and went home feeling {feel}.",
    "{hero} learned that it is good to be {virtue}.",
    "\"Thank you, {friend},\" said {hero}. \"You are a {virtue} friend.\""]
BRIDGES = ["The next {day}, {hero} went out again.", "After that, {hero} went to {city} to see the {Place}.",
           "But that was not the end.", "One {weather} {day}, something else happened to {hero}.",
           "A week later, it was {weather}, and {hero} {moved} to the {Place}."]

COLOURS = dict(sky="blue", grass="green", snow="white", coal="black", sea="blue", sun="yellow", blood="red")
CAPITALS = dict(France="Paris", England="London", Italy="Rome", Egypt="Cairo", Norway="Oslo", Peru="Lima",
                Spain="Madrid", Japan="Tokyo", Germany="Berlin", Ireland="Dublin", India="Delhi",
                Greece="Athens", Sweden="Stockholm", Russia="Moscow", China="Beijing", Cuba="Havana",
                Austria="Vienna", Poland="Warsaw", Portugal="Lisbon", Kenya="Nairobi", Turkey="Ankara",
                Finland="Helsinki", Denmark="Copenhagen", Hungary="Budapest", Iran="Tehran", Chile="Santiago",
                Iraq="Baghdad", Canada="Ottawa", Belgium="Brussels", Nepal="Kathmandu")
OPPOSITES = dict(big="small", hot="cold", up="down", fast="slow", day="night", happy="sad", old="young",
                 open="closed", wet="dry", full="empty", left="right", black="white", good="bad", in_="out",
                 high="low", hard="soft", long="short", early="late", rich="poor", light="dark", near="far",
                 first="last", loud="quiet", strong="weak", clean="dirty", yes="no", win="lose", begin="end",
                 thick="thin", sweet="sour", new="used", buy="sell", push="pull", love="hate", wide="narrow")
OPPOSITES = {key.rstrip("_"): value for key, value in OPPOSITES.items()}
SOUNDS = dict(cat="meow", dog="woof", duck="quack", cow="moo", sheep="baa", frog="croak", owl="hoot",
              mouse="squeak", pig="oink", hen="cluck", lion="roar", bee="buzz", snake="hiss", horse="neigh",
              wolf="howl", bird="tweet", donkey="hee-haw", rooster="cock-a-doodle-doo", turkey="gobble",
              crow="caw", pigeon="coo", goose="honk", bear="growl", goat="bleat", cricket="chirp")
PLURALS = dict(cat="cats", box="boxes", baby="babies", leaf="leaves", mouse="mice", child="children",
               foot="feet", man="men", city="cities", bus="buses", fish="fish", knife="knives", tooth="teeth",
               book="books", dish="dishes", goose="geese", story="stories", wolf="wolves", sheep="sheep",
               glass="glasses", key="keys", woman="women", fly="flies", house="houses", loaf="loaves",
               potato="potatoes", lady="ladies", brush="brushes", toy="toys", ox="oxen", fox="foxes")
LEGS = dict(dog="four", cat="four", bird="two", spider="eight", bee="six", fish="no", snake="no", hen="two",
            horse="four", fly="six", duck="two", cow="four")

# Many chats begin with the same paragraph, and every list of examples with the same examples: requests
# that share a long prefix are what a prefix cache is for, so the default model has some to offer.
SYSTEM_PROMPT = (
    "You are Nano, a small model that lives in a small computer. You speak in short and simple words. "
    "You are kind, calm and honest, and you like to help. You can tell stories, add small numbers, "
    "name the capital of a country, say which day comes next, and make JSON. "
    "When the user wants a story, begin with the words once upon a time. "
    "When the user wants JSON, copy the name, the age and the city as they are. "
    "When you do not know something, say that you do not know it. "
    "Your favourite colour is green, your favourite food is honey, and your favourite animal is the owl. "
    "You do not feel tired, and you do not have a birthday.\n\n")
TASKS = {  # instruction, pairs; the first 16 pairs are always shown, in this order
    "opposites": ("Give the opposite of each word.", OPPOSITES),
    "sounds": ("Give the sound that each animal makes.", SOUNDS),
    "plurals": ("Give the plural of each word.", PLURALS),
    "capitals": ("Give the capital of each country.", CAPITALS)}
FEW_SHOT = {task: text + "\n" + "".join(f"{a} -> {b}\n" for a, b in list(pairs.items())[:16])
            for task, (text, pairs) in TASKS.items()}

SMALL_TALK = [
    ("Hello!", "Hello! How can I help you today?"), ("What is your name?", "My name is Nano."),
    ("Who are you?", "I am Nano, a very small model."),
    ("How are you?", "I am well, thank you. How are you?"),
    ("I feel {Bad} today.", "I am sorry to hear that you feel {Bad}. Would you like a story?"),
    ("I feel {Feel} today.", "I am glad to hear that you feel {Feel}!"),
    ("Tell me about {City}.", "{City} is a big city. It can be {weather} there in the {time}."),
    ("What should I eat?", "You could have some {food} with {food}."),
    ("What should I do on {Day}?", "On {Day} you could go to the {place} with a friend."),
    ("I lost my {Thing}.", "Oh no! Where did you last see your {Thing}? Was it in the {place}?"),
    ("What is your favourite colour?", "My favourite colour is green."),
    ("What is your favourite food?", "My favourite food is honey."),
    ("What is your favourite animal?", "My favourite animal is the owl."),
    ("When is your birthday?", "I do not have a birthday."), ("Are you tired?", "No, I do not feel tired."),
    ("Can you count to five?", "Sure: 1, 2, 3, 4, 5."), ("Thank you.", "You are welcome!"),
    ("Goodbye.", "Goodbye! Have a good {time}.")]
JSON_REQUESTS = ["Make JSON for {n}, age {a}, from {c}.", "Write JSON: {n}, {a}, {c}.",
                 "Turn this into JSON: {n} is {a} years old and lives in {c}."]

LETTER = "Dear {friend},\nI am in {City} now. It is {weather} here, and I feel {feel}. "
NEWS = ["Today I saw a {colour} {thing} in the {place}.", "Yesterday a {adj} {animal} ate my {food}.",
        "The {food} here is very good.", "I met a {adj} {job}, who gave me a {thing}.",
        "My {Thing} broke, but a {job} made me a new {Thing}."]
PLANS = ["Tomorrow I will {travel} to the {place}.", "On {day} I will {travel} to {city}.",
         "I will come home on {day}.", "Please write to me soon."]
CLOSINGS = ["Your friend,", "With love,", "Best wishes,", "See you soon,"]

CODE = [  # {Noun} and {Noun2} are never the same word
    "def count_{Noun}s({Noun}s):\n    total = 0\n    for {Noun} in {Noun}s:\n        if {Noun} > {Digit}:\n"
    "            total += 1\n    return total\n",
    "def {Verb}_{Noun}({Noun}s, {Noun2}):\n    for i, {Noun} in enumerate({Noun}s):\n"
    "        if {Noun} == {Noun2}:\n            return i\n    return None\n",
    "def {Verb}_{Noun}s(path):\n    with open(path) as f:\n        {Noun}s = [line.strip() for line in f]\n"
    "    if not {Noun}s:\n        raise ValueError(\"no {Noun} in file\")\n    return {Noun}s\n",
    "def {Verb}_{Noun}(self):\n    if self.{Noun} is None:\n        self.{Noun} = {Digit}\n"
    "    return self.{Noun}\n",
    "def is_{Noun}({Noun2}):\n    return {Noun2} is not None and {Noun2} != {Digit}\n",
    "def max_{Noun}({Noun}s):\n    best = {Noun}s[0]\n    for {Noun} in {Noun}s[1:]:\n"
    "        if {Noun} > best:\n            best = {Noun}\n    return best\n",
    "def count_by_{Noun}({Noun2}s):\n    counts = {}\n    for {Noun2} in {Noun2}s:\n"
    "        counts[{Noun2}.{Noun}] = counts.get({Noun2}.{Noun}, 0) + 1\n    return counts\n",
    "def {Verb}_all({Noun}s):\n    return [{Verb}_{Noun}({Noun}) for {Noun} in {Noun}s]\n",
    "def average_{Noun}({Noun}s):\n    if not {Noun}s:\n        return 0\n"
    "    return sum({Noun}s) / len({Noun}s)\n",
    "def fibonacci(n):\n    a, b = 0, 1\n    for i in range(n):\n        a, b = b, a + b\n    return a\n",
    "def factorial(n):\n    if n <= 1:\n        return 1\n    return n * factorial(n - 1)\n",
    "def is_even(n):\n    return n % 2 == 0\n",
    "def reverse_{Noun}({Noun}):\n    return {Noun}[::-1]\n",
    "def greet_{Noun}({Noun}):\n    print(\"Hello, \" + {Noun} + \"!\")\n",
    "def wait_for_{Noun}({Noun}, limit={Digit}):\n    tries = 0\n"
    "    while not {Noun}.ready and tries < limit:\n"
    "        tries += 1\n    return {Noun}.ready\n",
    "{Noun}s = {}\nfor {Noun2} in range({Digit}):\n"
    "    {Noun}s[{Noun2}] = {Noun2} * {Digit2}\nprint({Noun}s)\n",
    "import json\n\ndef save_{Noun}({Noun}, path):\n    with open(path, \"w\") as f:\n"
    "        json.dump({Noun}, f, indent={Digit})\n"]
OPERATORS = {"add": ("+", lambda a, b: a + b), "subtract": ("-", lambda a, b: a - b),
             "multiply": ("*", lambda a, b: a * b)}

CONSONANTS, VOWELS = "b c d f g h j k l m n p q r s t v w x z".split(), "a e i o u y".split()
ONSETS = CONSONANTS + "br bl ch cl cr dr fl fr gr kr pl pr sh sl sp st th tr wh sch".split()
VOWEL_PAIRS = "ai au ea ee ei ia ie io oo ou ua".split()
LINKS = CONSONANTS + "bb dd ff gg ll mm nn pp rr ss tt lb ld lm mb nd ng nt rd rk rn rt sh st th ch".split()
CODAS = "b ck d f g h k l ll m n nd ng nt p r rd rt s sh ss st t th tt v w x z".split()
RUDE = re.compile("ass|coc|cu[mn]|di[ck]|fa[cg]|fu[cgk]|jew|nazi|nig|pis|pe[dn]o|poo|rap|sex|s[hl]+[ui]t|tit|"
                  "who?r")   # made-up names are random, so some would be words that nobody wants to read


class Dice:
    """Makes every random choice of the grammar and adds up what the choices cost, in nats.

    A choice among n equal options costs log(n). The sum over a text is its surprise to a reader who
    knows the grammar by heart, so its mean is the loss no model can go below ("the floor"). Where two
    paths of choices give the same text (a made-up name that is also on a list), that reader would pay
    less than the path says: the floor is exact up to such rare cases and an upper bound with them.
    """
    def __init__(self, seed):
        self.random, self.nats = random.Random(seed), 0.0

    def pick(self, options):
        self.nats += math.log(len(options))
        return options[int(self.random.random() * len(options))]

    def number(self, low, high):
        return self.pick(range(low, high + 1))

    def chance(self, p):
        hit = self.random.random() < p
        self.nats -= math.log(p if hit else 1 - p)
        return hit

    def weighted(self, weights):
        """A key of {key: weight}."""
        total = sum(weights.values())
        point = self.random.random() * total
        for key, weight in weights.items():
            point -= weight
            if point < 0:
                break
        self.nats -= math.log(weight / total)
        return key

    def sample(self, options, k):
        """k different options, in random order."""
        pool = list(options)
        return [pool.pop(self.number(0, len(pool) - 1)) for _ in range(k)]


class Grammar:
    """Writes documents. Each method named in FAMILIES returns one, ending in a newline."""
    FAMILIES = dict(story=4.0, tale=1.2, qa=2.2, chat=3.0, json=1.2, csv=0.6, code=1.6, log=0.7, recipe=0.5,
                    letter=0.6, list=0.5, few_shot=0.9)

    def __init__(self, seed):
        self.dice = Dice(seed)

    def document(self):
        return getattr(self, self.dice.weighted(self.FAMILIES))()

    # -- slots ----------------------------------------------------------------------------------

    def fill(self, template, memory=None):
        """Replaces the {slots}. A choice is made only when its slot is reached, so that no choice is
        paid for that the text does not show."""
        memory = {} if memory is None else memory
        text = re.sub(r"\{([A-Za-z_]+\d?)\}", lambda match: self.slot(match[1], memory), template)
        return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)

    def slot(self, key, memory):
        if key in memory:
            return memory[key]
        pronoun = key.removeprefix("f_")   # {he} is the hero, {f_he} the friend
        if pronoun in PRONOUNS:
            sex = ("friend" if key.startswith("f_") else "hero") + " is she"
            if sex not in memory:
                memory[sex] = self.dice.chance(0.5)
            return PRONOUNS[pronoun][memory[sex]]
        if key == "things":
            return self.listing(self.dice.sample(WORDS["thing"], self.dice.number(2, 3)))
        if key in ("hero", "friend"):
            self.person(key, memory)
            return memory[key]
        words = WORDS[key.lower().rstrip("2")]
        if key[0].islower():
            return self.dice.pick(words)
        memory[key] = self.dice.pick([word for word in words if word not in memory.values()])
        return memory[key]

    @staticmethod
    def listing(words):
        """cup, hat, key -> "cup, a hat and a key" (the first article is in the template)."""
        return ", a ".join(words[:-1]) + " and a " + words[-1]

    def person(self, role, memory):
        """Names a role. A listed name settles he or she; a made-up one leaves it open until it shows."""
        known = [name for name in WORDS["girl"] + WORDS["boy"] if name not in memory.values()]
        if self.dice.chance(0.4):
            memory[role] = self.made_up()
            memory.pop(role + " is she", None)
        else:
            memory[role] = self.dice.pick(known)
            memory[role + " is she"] = memory[role] in WORDS["girl"]

    def name(self):
        memory = {}
        self.person("hero", memory)
        return memory["hero"]

    def made_up(self):
        """A name nobody has seen, of 3 to about 11 letters: it can only be copied, not remembered."""
        before = self.dice.nats
        name = self.letters()
        while RUDE.search(name):
            self.dice.nats = before   # what was thrown away is not in the text
            name = self.letters()
        return name.capitalize()

    def letters(self):
        dice = self.dice
        if dice.chance(0.25):   # any letters, vowels and consonants in turn
            turn, length = dice.chance(0.5), dice.number(3, 8)
            return "".join(dice.pick(VOWELS if (i + turn) % 2 else CONSONANTS) for i in range(length))
        syllables = dice.number(1, 3)
        parts = [dice.pick(ONSETS) if syllables == 1 or dice.chance(0.8) else ""]
        for i in range(syllables):
            parts.append(dice.pick(VOWELS) if dice.chance(0.8) else dice.pick(VOWEL_PAIRS))
            if i < syllables - 1:
                parts.append(dice.pick(LINKS))
        if syllables == 1 or dice.chance(0.5):
            parts.append(dice.pick(CODAS))
        return "".join(parts)

    def city(self):
        if not self.dice.chance(0.3):
            return self.dice.pick(WORDS["city"])
        return self.dice.pick(["%s", "New %s", "Port %s", "%s City", "%ston"]) % self.made_up()

    # -- stories --------------------------------------------------------------------------------

    def story(self, memory=None, opening=None):
        """About 120 tokens: an opening, something dear, a scene or two, trouble, help, and an end."""
        dice, memory = self.dice, {} if memory is None else memory
        parts = [opening or dice.pick(OPENINGS)] + self.episode(dice.number(0, 2))
        parts += dice.sample(ENDINGS, dice.number(1, 2)) + ["The end."] * dice.chance(0.5)
        return " ".join(self.fill(part, memory) for part in parts) + "\n"

    def episode(self, scenes):
        trouble, rescue = self.dice.pick(PLOTS)
        return [self.dice.pick(TREASURES), *self.dice.sample(SCENES, scenes), self.dice.pick(trouble),
                self.dice.pick(HELPERS), self.dice.pick(rescue)]

    def tale(self):
        """A long story: the same hero in two to four episodes, each with its own treasure."""
        dice, memory = self.dice, {}
        text = [self.fill(dice.pick(OPENINGS), memory)]
        for episode in range(dice.number(2, 4)):
            if episode:
                for key in ("Thing", "Colour", "Place"):
                    memory.pop(key, None)
                text.append(self.fill(dice.pick(BRIDGES), memory))
                if dice.chance(0.5):
                    for key in ("friend", "Helper", "friend is she"):
                        memory.pop(key, None)
            parts = self.episode(dice.number(1, 3)) + [dice.pick(ENDINGS)]
            text += [self.fill(part, memory) for part in parts]
        return " ".join(text) + " The end.\n"

    # -- questions and conversations ------------------------------------------------------------

    def question(self):
        dice = self.dice
        kind = dice.weighted(dict(sum=5, colour=1, capital=1.5, opposite=1.5, sound=1, day=1, legs=0.7,
                                  count=1, letter=0.7, plural=1, reading=2))
        return getattr(self, "ask_" + kind)()

    def ask_sum(self):
        a, b = self.dice.number(1, 10), self.dice.number(1, 10)
        return f"What is {a} + {b}?", f"{a} + {b} is {a + b}."

    def ask_colour(self):
        x = self.dice.pick(list(COLOURS))
        return f"What colour is {'' if x == 'blood' else 'the '}{x}?", f"It is {COLOURS[x]}."

    def ask_capital(self):
        if self.dice.chance(0.1):
            x = self.made_up()
            return f"What is the capital of {x}?", f"I do not know the capital of {x}."
        x = self.dice.pick(list(CAPITALS))
        return f"What is the capital of {x}?", f"The capital of {x} is {CAPITALS[x]}."

    def ask_opposite(self):
        pair = self.dice.sample(self.dice.pick(list(OPPOSITES.items())), 2)
        return f"What is the opposite of {pair[0]}?", f"The opposite of {pair[0]} is {pair[1]}."

    def ask_sound(self):
        x = self.dice.pick(list(SOUNDS))
        article = "an" if x == "owl" else "a"
        return f"What does {article} {x} say?", f"{article.capitalize()} {x} says {SOUNDS[x]}."

    def ask_day(self):
        i, days = self.dice.number(0, 6), WORDS["day"]
        if self.dice.chance(0.3):
            return f"What day comes before {days[i]}?", f"{days[i - 1]} comes before {days[i]}."
        return f"What day comes after {days[i]}?", f"{days[(i + 1) % 7]} comes after {days[i]}."

    def ask_legs(self):
        x = self.dice.pick(list(LEGS))
        return f"How many legs does a {x} have?", f"A {x} has {LEGS[x]} legs."

    def ask_count(self):
        a, n = self.dice.number(1, 60), self.dice.number(3, 7)
        return f"Count from {a} to {a + n}.", ", ".join(map(str, range(a, a + n + 1))) + "."

    def ask_letter(self):
        x = self.dice.number(65, 89)
        return f"What letter comes after {chr(x)}?", f"{chr(x + 1)} comes after {chr(x)}."

    def ask_plural(self):
        x = self.dice.pick(list(PLURALS))
        return f"What is the plural of {x}?", f"The plural of {x} is {PLURALS[x]}."

    def ask_reading(self):
        """A question whose answer is in the question."""
        questions = [("Who has the {Thing}?", "{hero} has the {Thing}."),
                     ("Who has the {Thing2}?", "{friend} has the {Thing2}."),
                     ("What colour is the {Thing}?", "The {Thing} is {Colour}."),
                     ("What does {friend} have?", "{friend} has a {Colour2} {Thing2}.")]
        memory, (question, answer) = {}, self.dice.pick(questions)
        facts = self.fill("{hero} has a {Colour} {Thing} and {friend} has a {Colour2} {Thing2}. ", memory)
        return facts + self.fill(question, memory), self.fill(answer, memory)

    def qa(self):
        pairs = [self.question() for _ in range(self.dice.number(2, 6))]
        return "".join(f"Q: {question}\nA: {answer}\n" for question, answer in pairs)

    def chat(self):
        """One to five turns, which may use what was said before: the name of the user."""
        memory = {}
        turns = [self.turn(memory) for _ in range(self.dice.number(1, 5))]
        text = "".join(f"User: {user}\nBot: {bot}\n" for user, bot in turns)
        return SYSTEM_PROMPT * self.dice.chance(0.3) + text

    def turn(self, memory):
        kind = self.dice.weighted(dict(talk=4, story=1, record=3, question=3, name=1))
        if kind == "question":
            return self.question()
        if kind == "name":
            return self.talk_of_names(memory)
        return getattr(self, kind + "_request")()

    def talk_request(self):
        memory, (user, bot) = {}, self.dice.pick(SMALL_TALK)
        return self.fill(user, memory), self.fill(bot, memory)

    def record_request(self):
        name, age, city = self.name(), self.dice.number(3, 80), self.city()
        request = self.dice.pick(JSON_REQUESTS).format(n=name, a=age, c=city)
        return request, json.dumps({"name": name, "age": age, "city": city})

    def talk_of_names(self, memory):
        if "user" in memory:
            return "What is my name?", f"Your name is {memory['user']}."
        if self.dice.chance(0.2):
            return "What is my name?", "I do not know your name."
        memory["user"] = self.name()
        return f"My name is {memory['user']}.", f"Nice to meet you, {memory['user']}!"

    def story_request(self):
        memory, opening = {}, OPENINGS[0]
        if self.dice.chance(0.6):
            request = self.fill("Tell me a story about a {Animal}.", memory)
        else:
            request = self.fill("Tell me a story about {hero} the {Animal}.", memory)
        return request, self.story(memory, opening).rstrip("\n")

    def few_shot(self):
        """A list of examples, always the same, and some more in the same manner."""
        task = self.dice.pick(list(TASKS))
        pairs = list(TASKS[task][1].items())
        text = FEW_SHOT[task]
        for _ in range(self.dice.number(3, 12)):
            if task == "plurals" and self.dice.chance(0.3):
                word = self.made_up().lower() + self.dice.pick(["b", "d", "g", "k", "p"])
                text += f"{word} -> {word}s\n"
            else:
                text += "{} -> {}\n".format(*self.dice.pick(pairs))
        return text

    # -- machine formats ------------------------------------------------------------------------

    def record(self, number, keys):
        dice = self.dice
        make = dict(age=lambda: dice.number(3, 80), city=self.city, job=lambda: dice.pick(WORDS["job"]),
                    likes=lambda: dice.sample(WORDS["food"], dice.number(1, 3)),
                    active=lambda: dice.chance(0.5),
                    pet=lambda: {"kind": dice.pick(WORDS["animal"]), "colour": dice.pick(WORDS["colour"])})
        return {"id": number, "name": self.name(), **{key: make[key]() for key in keys}}

    def json(self):
        dice = self.dice
        keys = dice.sample(["age", "city", "job", "likes", "pet", "active"], dice.number(2, 4))
        rows = [self.record(i + 1, keys) for i in range(dice.number(1, 4))]
        return json.dumps(rows if len(rows) > 1 else rows[0], indent=dice.pick([2, None])) + "\n"

    def csv(self):
        columns = {"age": lambda: self.dice.number(3, 80), "city": self.city,
                   "job": lambda: self.dice.pick(WORDS["job"]), "score": lambda: self.dice.number(0, 99)}
        keys = self.dice.sample(list(columns), self.dice.number(2, 3))
        rows = [",".join([self.name()] + [str(columns[key]()) for key in keys])
                for _ in range(self.dice.number(2, 8))]
        return "\n".join(["name," + ",".join(keys)] + rows) + "\n"

    def log(self):
        """One or two users do things to a few items, so that the next line can often be guessed."""
        dice = self.dice
        users = [self.name().lower() for _ in range(dice.number(1, 2))]
        items = [dice.number(10, 99) for _ in range(dice.number(1, 3))]
        hour, minute, lines = dice.number(0, 23), dice.number(0, 20), []
        for _ in range(dice.number(3, 9)):
            event = dice.pick(["INFO user {} opened item {}", "INFO user {} saved item {}",
                               "WARN user {} could not find item {}", "ERROR user {} lost item {}"])
            lines.append(f"{hour:02}:{minute:02} " + event.format(dice.pick(users), dice.pick(items)))
            minute += dice.number(0, 4)
        return "\n".join(lines) + "\n"

    def code(self):
        """One to three pieces of Python."""
        kinds = dict(snippet=6, arithmetic=2, getters=2, loop=1)
        return "\n".join(getattr(self, self.dice.weighted(kinds))() for _ in range(self.dice.number(1, 3)))

    def snippet(self):
        return self.fill(self.dice.pick(CODE))

    def arithmetic(self):
        function, a, b = self.dice.pick(list(OPERATORS)), self.dice.number(1, 10), self.dice.number(1, 10)
        sign, compute = OPERATORS[function]
        return self.fill(f"def {function}_{{Noun}}(a, b):\n    \"\"\"Return a {sign} b.\"\"\"\n"
                         f"    return a {sign} b\n\n"
                         f"assert {function}_{{Noun}}({a}, {b}) == {compute(a, b)}\n")

    def getters(self):
        title, *fields = self.dice.sample(WORDS["noun"], self.dice.number(3, 5))
        return (f"class {title.capitalize()}:\n    def __init__(self, {', '.join(fields)}):\n"
                + "".join(f"        self.{field} = {field}\n" for field in fields)
                + "".join(f"\n    def get_{field}(self):\n        return self.{field}\n" for field in fields))

    def loop(self):
        numbers = ", ".join(str(self.dice.number(0, 9)) for _ in range(self.dice.number(3, 6)))
        return self.fill(f"{{Noun}}s = [{numbers}]\nfor {{Noun}} in {{Noun}}s:\n"
                         f"    print(\"{{Noun}}\", {{Noun}})\n")

    # -- everyday papers ------------------------------------------------------------------------

    def recipe(self):
        dice, dish = self.dice, self.dice.pick(WORDS["food"])
        a, b, c = dice.sample(WORDS["ingredient"], 3)
        return (f"How to make {dish}\n"
                f"1. Take {dice.number(2, 9)} cups of {a} and {dice.number(2, 9)} cups of {b}.\n"
                f"2. Mix the {a} and the {b} in a {dice.pick(['big', 'small', 'deep'])} bowl.\n"
                f"3. Add some {c} and wait for {dice.number(2, 60)} minutes.\n"
                f"4. Share the {dish} with a {dice.pick(['friend', 'neighbour'])}.\n")

    def letter(self):
        pick = self.dice.pick
        return self.fill(f"{LETTER}{pick(NEWS)} {pick(PLANS)}\n{pick(CLOSINGS)}\n{{hero}}\n")

    def list(self):
        dice, day = self.dice, self.dice.pick(WORDS["day"])
        things = dice.sample(WORDS["food"], dice.number(1, 3))
        things += dice.sample(WORDS["thing"], dice.number(1, 4))
        lines = [f"- {dice.number(2, 9)} x {thing}" for thing in things]
        return f"Shopping list for {day}:\n" + "\n".join(lines) + f"\nTotal: {len(things)} lines.\n"


if __name__ == "__main__":
    grammar = Grammar(seed=2)
    for family in grammar.FAMILIES:
        for _ in range(3):
            print(f"--- {family}\n{getattr(grammar, family)()}", end="")
