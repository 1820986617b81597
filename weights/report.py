"""What the two models of this folder can do: losses, counted skills, and how often the draft is accepted.

    python weights/train.py --report
"""
import json
import math

import numpy as np
import torch

import train
from grammar import CAPITALS, FEW_SHOT, JSON_REQUESTS, OPPOSITES, PLURALS, SYSTEM_PROMPT, WORDS, Grammar

# Names that the grammar's recipe for made-up names cannot write.
STRANGE_NAMES = ("Alexander Christopher O'Brien Jean-Luc McDonald Wojciech Bartholomew Schwartz Xqrtz Zzyzx "
                 "Aardvark BOB nano R2D2 Quentinella Mary-Ann Nguyen Bjork Llewellyn Tchaikovsky").split()


def report(corpus, tokenizer):
    target, draft = (train.load(train.HERE / name) for name in ("tiny", "draft"))
    for name, model in (("target", target), ("draft", draft)):
        loss, floor = train.evaluate(model, corpus)
        print(f"{name}: held-out {loss:.4f} nats/token, floor {floor:.4f}")
    report_skills(target, tokenizer)
    report_families(target, draft, tokenizer)


# Skills ----------------------------------------------------------------------------------------

def report_skills(model, tokenizer):
    """Greedy answers that are right to the last character."""
    print("skill: exact answers of the target, greedy")
    for skill, pairs in skills().items():
        news = train.generate(model, tokenizer, [prompt for prompt, _ in pairs], 48)
        answers = [tokenizer.decode(new).split("\n")[0].strip() for new in news]
        wrong = [(prompt, got) for (prompt, want), got in zip(pairs, answers) if got != want]
        print(f"  {skill:32} {len(pairs) - len(wrong):3} of {len(pairs)}", *wrong[:2], sep="   ")


def skills():
    """name -> list of (prompt, the one right answer)."""
    grammar = Grammar(3)
    dice, days = grammar.dice, WORDS["day"]
    known = [dice.pick(WORDS["girl"] + WORDS["boy"]) for _ in range(60)]
    new = [grammar.made_up() for _ in range(60)]
    cities = [dice.pick(WORDS["city"]) for _ in range(60)]
    new_cities = [grammar.made_up() for _ in range(60)]
    questions = {
        "sums 1..10": [(f"What is {a} + {b}?", f"{a} + {b} is {a + b}.")
                       for a in range(1, 11) for b in range(1, 11)],
        "day after, day before": [
            (f"What day comes {word} {days[i]}?", f"{days[(i + d) % 7]} comes {word} {days[i]}.")
            for i in range(7) for word, d in (("after", 1), ("before", -1))],
        "capitals": [(f"What is the capital of {a}?", f"The capital of {a} is {b}.")
                     for a, b in CAPITALS.items()],
        "opposites": [(f"What is the opposite of {a}?", f"The opposite of {a} is {b}.")
                      for pair in OPPOSITES.items() for a, b in (pair, pair[::-1])],
        "plurals": [(f"What is the plural of {a}?", f"The plural of {a} is {b}.")
                    for a, b in PLURALS.items()],
        "reading": [grammar.ask_reading() for _ in range(60)],
        "counting": [grammar.ask_count() for _ in range(60)]}
    out = {skill: [(f"Q: {q}\nA:", a) for q, a in pairs] for skill, pairs in questions.items()}
    out["JSON, known name and city"] = json_requests(grammar, known, cities)
    out["JSON, made-up name"] = json_requests(grammar, new, cities)
    out["JSON, made-up name and city"] = json_requests(grammar, new, new_cities)
    out["JSON, name of another shape"] = json_requests(grammar, STRANGE_NAMES * 3, cities)
    out["name told two turns before"] = [
        (f"User: My name is {name}.\nBot: Nice to meet you, {name}!\nUser: What is 2 + 3?\nBot: 2 + 3 is 5.\n"
         "User: What is my name?\nBot:", f"Your name is {name}.") for name in known[:30] + new[:30]]
    return out


def json_requests(grammar, names, cities):
    out = []
    for i, (name, city) in enumerate(zip(names, cities)):
        age = grammar.dice.number(3, 80)
        request = JSON_REQUESTS[i % 3].format(n=name, a=age, c=city)
        out.append((f"User: {request}\nBot:", json.dumps({"name": name, "age": age, "city": city})))
    return out


# Families --------------------------------------------------------------------------------------

def report_families(target, draft, tokenizer, count=16):
    """For every family: loss and floor on new documents, and acceptance on what the target writes itself.

    At T=1 a draft token is accepted with probability sum(min(p, q)); at T=0 when both argmaxes agree.
    """
    print("family: target loss / floor; draft acceptance at T=0, T=1")
    total, all_rates = sum(Grammar.FAMILIES.values()), []
    for family, weight in Grammar.FAMILIES.items():
        grammar = Grammar(4)
        grammar.document = getattr(grammar, family)   # this family only
        ids, starts, nats = train.encode_documents(tokenizer, grammar, 15_000)
        documents = dict(held=ids, held_starts=starts, nats=nats + math.log(total / weight))
        loss, floor = train.evaluate(target, documents)
        prompts = [opening(grammar.document(), tokenizer) for _ in range(count)]
        rates = [acceptance(target, draft, tokenizer, prompts, temperature) for temperature in (0, 1)]
        all_rates.append(rates)
        print(f"  {family:9} {loss:.3f} / {floor:.3f}   {rates[0]:.2f}  {rates[1]:.2f}")
    print("  mean of families         {:.2f}  {:.2f}".format(*np.mean(all_rates, 0)))


def opening(text, tokenizer):
    """A prompt: the first third of a document, not counting what is the same in all of its kind."""
    fixed = next((part for part in (SYSTEM_PROMPT, *FEW_SHOT.values()) if text.startswith(part)), "")
    ids = tokenizer.encode(text[len(fixed):])
    return fixed + tokenizer.decode(ids[:len(ids) // 3])


def acceptance(target, draft, tokenizer, prompts, temperature):
    rates = []
    for prompt, new in zip(prompts, train.generate(target, tokenizer, prompts, 80, temperature, seed=5)):
        start = tokenizer.encode(prompt)
        ids = torch.tensor([start + new])[:, :-1]
        logits = [train.logits_of(model, ids)[0, len(start) - 1:] for model in (target, draft)]
        p, q = (torch.softmax(each, -1) for each in logits)
        agreed = torch.minimum(p, q).sum(-1) if temperature else (p.argmax(-1) == q.argmax(-1)).float()
        rates += agreed.tolist()
    return sum(rates) / len(rates)
