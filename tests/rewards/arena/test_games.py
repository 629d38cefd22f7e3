"""The arena's games: floors and optima by enumeration, controls, prompts and answers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from statistics import fmean

import pytest

from comlrl.builtin import DATASETS
from comlrl.config.sections import DatasetConfig
from comlrl.errors import UserError
from comlrl.rewards.arena import chores, climbing, codebook, dilemma, levers, lock, shards
from comlrl.rewards.arena.game import Bounds, PartnersAnswer, first_legal
from comlrl.rewards.arena.games import ARENA
from comlrl.tasks.datasets import load_tasks
from comlrl.tasks.prompts import Prompts
from comlrl.types import Attempt, JointAction, Score, Task
from tools.make_arena import rows


def made(game: str, num: int, **fields) -> list[Task]:
    name = f"arena-{game}"
    return [ARENA[name].task(row["task_id"], row) for row in rows(game, num, **fields)]


def value(reward, task: Task, *answers: str) -> float:
    (score,) = reward.score([JointAction(task, answers)])
    return score.value


# Enumeration of policies and joint actions.


@pytest.mark.parametrize(("symbols", "letters"), [(2, 1), (4, 1), (5, 1), (3, 2)])
def test_codebook_bounds(symbols, letters):
    """All the speaker's codes, each with its best listener; and all listeners without a message."""
    tasks, reward = made("codebook", symbols, symbols=symbols, letters=letters), codebook.CODEBOOK
    sent, names = codebook.messages(letters)[:6], tasks[0].fields["symbols"]
    paid = {
        (i, m, n): value(reward.reward(), task, m, n)
        for i, task in enumerate(tasks)
        for m in sent
        for n in names
    }
    best = max(
        sum(
            max(sum(paid[i, m, n] for i in range(symbols) if code[i] == m) for n in names)
            for m in sent
        )
        for code in itertools.product(sent, repeat=symbols)
    )
    assert best / symbols == codebook.optimum(symbols, letters)
    silenced = max(fmean(paid[i, sent[0], n] for i in range(symbols)) for n in names)
    assert silenced == pytest.approx(codebook.floor(symbols))
    assert codebook.optimum(16, 1) == 0.25 and codebook.optimum(16, 2) == 1


def test_climbing_bounds():
    (task,), reward = made("climbing", 1), climbing.ClimbingReward()
    paid = [[value(reward, task, a, b) for b in climbing.COLORS] for a in climbing.COLORS]
    assert fmean(itertools.chain(*paid)) == pytest.approx(climbing.floor()) == -31 / 9
    assert max(itertools.chain(*paid)) == climbing.optimum() == 11
    # against a partner that chooses at random (Claus and Boutilier 1998)
    assert [round(fmean(row), 1) for row in paid] == [-6.3, -5.7, 1.7]


def test_chores_bounds():
    """Every policy on a grid that four agents share; and all joint actions."""
    (task,), reward = made("chores", 1), chores.ChoresReward()
    teams = list(itertools.product(range(4), repeat=4))
    paid = {t: value(reward, task, *(chores.CHORES[i] for i in t)) for t in teams}
    assert max(paid.values()) == chores.optimum() == 1
    shared = {
        parts: sum(
            paid[t] * parts[t[0]] * parts[t[1]] * parts[t[2]] * parts[t[3]] for t in teams
        ) / 8**4
        for parts in itertools.product(range(9), repeat=4)
        if sum(parts) == 8
    }  # fmt: skip
    assert max(shared, key=shared.__getitem__) == (2, 2, 2, 2)
    assert shared[2, 2, 2, 2] == pytest.approx(chores.floor()) == 1 - 0.75**4
    assert shared[8, 0, 0, 0] == 0.25


def test_levers_bounds():
    """Strangers that each agree within their team; and teams that treat the nine levers alike."""
    (task,), reward = made("levers", 1), levers.LeversReward()
    paid = {pair: value(reward, task, *pair) for pair in itertools.product(levers.LEVERS, repeat=2)}
    nine = levers.LEVERS[1:]
    assert fmean(paid[a, b] for a in nine for b in nine) == pytest.approx(levers.floor()) == 1 / 9
    alike = []
    for special in (i / 20 for i in range(21)):
        pulls = [special, *[(1 - special) / 9] * 9]
        alike.append(sum(paid[a, b] * pulls[int(a)] * pulls[int(b)] for a, b in paid))
    assert max(alike) == levers.optimum() == 0.9
    assert max(paid.values()) == levers.LEVERS_GAME.greatest_reward(2) == 1


@pytest.mark.parametrize("question", ["largest", "median"])
@pytest.mark.parametrize("holders", [2, 3, 4, 8])
def test_shards_bounds(holders, question):
    """Orders of N numbers, in which each place holds each number as often: the best answer without
    reading, and a judge that reads all."""
    reward, names = shards.ShardsReward(), [n.lower() for n in shards.NAMES[:holders]]
    right = dict.fromkeys(names, 0.0)
    orders = list(itertools.permutations(range(2, 2 + holders)))
    if holders == 8:
        orders = [(*orders[999][i:], *orders[999][:i]) for i in range(holders)]
    for numbers in orders:
        task = Task("t", {"numbers": list(numbers), "question": question})
        written = [str(number) for number in numbers]
        for name in names:
            right[name] += value(reward, task, *written, name) / len(orders)
        read = sorted(zip(written, names, strict=True))
        named = read[-1] if question == "largest" else read[(holders - 1) // 2]
        assert value(reward, task, *written, named[1]) == shards.optimum() == 1
    assert max(right.values()) == pytest.approx(shards.floor(holders)) == 1 / holders


@pytest.mark.parametrize(("holders", "row"), [(2, 8), (3, 6), (4, 4), (5, 8), (7, 8), (8, 8)])
def test_pairs_may_lie_beyond_the_holders(row, holders):
    """All places of the equal numbers, and as many rows without any."""
    places = list(itertools.combinations(range(row), 2))
    rows_of = [list(range(1, row + 1)) for _ in range(2 * len(places))]
    for numbers, (first, second) in zip(rows_of, places, strict=False):
        numbers[second] = numbers[first]
    answers = [shards.right_answer(numbers[:holders], "pair") for numbers in rows_of]
    best = max(answers.count(answer) for answer in ("yes", "no")) / len(answers)
    task = Task("t", {"numbers": rows_of[0], "question": "pair"})
    bounds = shards.SHARDS.bounds(task, holders + 1, 1, shards.ShardsReward())
    assert bounds.floor == pytest.approx(best)


def test_shards_pair_bounds():
    tasks, reward = made("shards", 40, question="pair", holders=4), shards.ShardsReward()
    always = fmean(value(reward, task, "1", "1", "1", "1", "yes") for task in tasks)
    assert always == shards.floor(4, "pair") == 0.5
    for task in tasks:
        right = "yes" if len(set(task.fields["numbers"])) < 4 else "no"
        assert value(reward, task, "1", "1", "1", "1", right) == 1


def episode(game, task: Task, turns: Sequence[Sequence[str]]) -> list[JointAction]:
    """The joint actions of one branch."""
    past: tuple[JointAction, ...] = ()
    for turn, answers in enumerate(turns, start=1):
        past = (*past, JointAction(task, tuple(answers), turn, past))
    return list(past)


@pytest.mark.parametrize("pay", ["sparse", "dense"])
@pytest.mark.parametrize("turns", [1, 2])
def test_lock_bounds(turns, pay):
    """Every sequence of joint actions: what they are worth at random, and the best."""
    reward = lock.LockReward(turns, pay)
    for task in made("lock", 3):
        pairs = list(itertools.product(lock.SYMBOLS, repeat=2))
        totals = [
            sum(score.value for score in reward.score(episode(lock.LOCK, task, sequence)))
            for sequence in itertools.product(pairs, repeat=turns)
        ]
        assert fmean(totals) == pytest.approx(lock.floor(turns, pay))
        assert max(totals) == pytest.approx(lock.optimum())
        assert sum(total == pytest.approx(1) for total in totals) == 1
    assert lock.floor(turns) == pytest.approx(3 ** (-2 * turns))


def test_an_error_in_lock_is_final():
    task = ARENA["arena-lock"].task("t", {"game": "arena-lock", "secrets": [1, 2]})
    right = [("1", "2"), ("0", "0"), ("1", "2"), ("0", "0")]  # 1+2=0, 2+1=0; 1+0=1, 2+0=2
    dense, sparse = lock.LockReward(4, "dense"), lock.LockReward(4)
    assert [s.value for s in dense.score(episode(lock.LOCK, task, right))] == [0.25] * 4
    assert [s.value for s in sparse.score(episode(lock.LOCK, task, right))] == [0, 0, 0, 1]
    for wrong in (("1", "0"), ("1", "none")):
        late = [right[0], wrong, *right[2:]]
        assert [s.value for s in dense.score(episode(lock.LOCK, task, late))] == [0.25, 0, 0, 0]


def test_dilemma_bounds():
    """Defecting pays more against either move; cooperating pays more to both together."""
    (task,), own = made("dilemma", 1), dilemma.DilemmaReward()
    scores = {
        pair: own.score([JointAction(task, pair)])[0]
        for pair in itertools.product(dilemma.MOVES, repeat=2)
    }
    for other in dilemma.MOVES:
        assert scores["defect", other].by_agent[0] > scores["cooperate", other].by_agent[0]
        assert scores[other, "defect"].by_agent[1] > scores[other, "cooperate"].by_agent[1]
    assert scores["defect", "defect"].value == dilemma.floor() == 1
    assert max(s.value for s in scores.values()) == dilemma.optimum() == 3
    assert max(scores, key=lambda pair: scores[pair].value) == ("cooperate", "cooperate")
    assert (dilemma.floor(5), dilemma.optimum(5)) == (5, 15)


# Controls: partners that only guess, and one agent with all information.

CONTROLS = {  # game → value of the best reply to partners that choose at random, and of all
    "codebook": (1 / 16, 1),
    "climbing": (11 / 3, 11),
    "shards": (1 / 2, 1),
    "lock": (1 / 3, 1),
    "chores": (1 - (3 / 4) ** 4, 1),
    "levers": (1 / 10, 1),
    "dilemma": (2.75, 3),  # welfare; cooperating
}


@pytest.mark.parametrize("name", CONTROLS)
def test_controls(name):
    """The last agent's best reply on average over tasks that it cannot tell apart; and the best
    joint action of each task."""
    game, count = ARENA[f"arena-{name}"], ARENA[f"arena-{name}"].agents[0]
    tasks = made(name, {"codebook": 16, "lock": 9}.get(name, 1))
    if name == "shards":
        pairs = itertools.permutations((4, 5, 6), 2)
        fields = {"game": game.name, "question": "largest"}
        tasks = [game.task("t", fields | {"numbers": list(pair)}) for pair in pairs]
    replies: dict[str, list[list[float]]] = {}
    best = []
    for task in tasks:
        *others, own = [game.legal(task, agent, count) for agent in range(count)]
        guesses = list(itertools.product(*others))
        read = Prompts(game).first(task, count)[-1]
        paid = [[value(reward_of(game.name), task, *g, reply) for g in guesses] for reply in own]
        replies.setdefault(read, []).append([fmean(row) for row in paid])
        best.append(max(map(max, paid)))
    alone = [max(map(fmean, zip(*rows, strict=True))) for rows in replies.values()]
    assert (fmean(alone), fmean(best)) == pytest.approx(CONTROLS[name])


# Answers.


def test_the_first_legal_word_counts():
    legal = ("cat", "sun", "A", "AB")
    assert first_legal("I say: Sun, not cat.", legal) == "sun"
    assert first_legal("a message: AB", legal) == "AB"  # an article is no letter
    assert first_legal("ABC catalog sunny", legal) is None
    assert first_legal("**cat**\n", legal) == "cat"
    assert first_legal("10", ("1", "0")) is None


def reward_of(name: str):
    return lock.LockReward(1) if name == "arena-lock" else ARENA[name].reward()


@pytest.mark.parametrize("name", ARENA)
def test_an_illegal_answer_never_beats_a_legal_one(name):
    game, reward = ARENA[name], reward_of(name)
    count = game.agents[0]
    (task, *_) = load_tasks(DatasetConfig(name=f"builtin:{name}"), "train", game)
    legal = [game.legal(task, agent, count) for agent in range(count)]
    paid = {pair: value(reward, task, *pair) for pair in itertools.product(*legal)}
    least = min(paid.values())
    for answers in itertools.islice(paid, 40):
        for agent in range(count):
            broken = (*answers[:agent], "no legal word", *answers[agent + 1 :])
            assert value(reward, task, *broken) <= least
            action = JointAction(task, broken)
            measured = game.measures(action, Score(0.0))["legal_answers"]
            assert measured == pytest.approx(1 - 1 / count)


# Prompts: who reads what.


def test_agents_read_what_they_may():
    game = codebook.CODEBOOK
    tasks = made("codebook", 4, symbols=4)
    listeners = {Prompts(game).first(task, 2)[1] for task in tasks}
    assert len(listeners) == 1  # nothing of the symbol
    assert game.handed_on(tasks[0], 1, 2, ["I send AB: cat"]) == "The message: AB\n"
    assert game.handed_on(tasks[0], 1, 2, ["cat"]) == "The message: nothing\n"
    task = made("shards", 1)[0]
    *holders, judge = Prompts(shards.SHARDS).first(task, 4)
    for number, prompt in zip(task.fields["numbers"], holders, strict=False):
        assert f"hold the number {number}." in prompt
    assert not any(digit in judge for digit in shards.DIGITS)
    assert shards.SHARDS.handed_on(task, 1, 4, ["3"]) == ""
    assert shards.SHARDS.handed_on(task, 3, 4, ["3", "x", "9 or 8"]) == (
        "Ada wrote 3.\nBen wrote nothing.\nCleo wrote 9.\n"
    )


def test_chores_prompts_are_equal_or_numbered():
    (task,) = made("chores", 1)
    assert len(set(Prompts(chores.CHORES_GAME).first(task, 4))) == 1
    (numbered,) = made("chores", 1, numbered=True)
    prompts = Prompts(chores.CHORES_GAME).first(numbered, 4)
    assert [prompt[:17] for prompt in prompts] == [f"You are person {i}." for i in range(1, 5)]


@pytest.mark.parametrize("name", ["arena-lock", "arena-dilemma"])
def test_partners_read_each_others_last_answer(name):
    game = ARENA[name]
    task = made(name.removeprefix("arena-"), 3)[-1]
    answers = (game.legal(task, 0, 2)[0], "nonsense")
    mode = PartnersAnswer(Prompts(game))
    ((first, second),) = mode([Attempt(task, answers, Score(0.0), 1)])
    assert first.startswith("Your partner wrote nothing.\n")
    assert second.startswith(f"Your partner wrote {answers[0]}.\n")
    if name == "arena-lock":
        assert ["Your secret is 0" in first, "Your secret is 2" in second] == [True, True]


def test_lock_does_not_tell_of_an_error():
    game, task = lock.LOCK, made("lock", 6)[-1]  # secrets 1 and 2
    mode = PartnersAnswer(Prompts(game))
    right, wrong = (Attempt(task, ("1", "2"), Score(paid), 1) for paid in (1.0, 0.0))
    other = Attempt(task, ("0", "2"), Score(0.0), 1)  # the first agent's error
    assert mode([right]) == mode([wrong])
    assert mode([right])[0][0] == mode([other])[0][0] and mode([right])[0][1] != mode([other])[0][1]


# Names, rows and teams.


@pytest.mark.parametrize("name", ARENA)
def test_data_names_and_bounds(name):
    game = ARENA[name]
    section = DatasetConfig(name=f"builtin:{name}")
    for split in DATASETS[section.name]:
        tasks = load_tasks(section, split, game)
        roles = game.roles(game.agents[1])
        assert len(set(roles)) == len(roles) == game.agents[1]
        bounds = game.bounds(tasks[0], game.agents[0], 2, reward_of(name))
        assert bounds.floor < bounds.optimum
        assert "{" not in "".join(Prompts(game).first(tasks[0], game.agents[1]))
    with pytest.raises(UserError, match=rf"`game` is not '{name}'; use builtin:{name};"):
        load_tasks(DatasetConfig(name="builtin:posts"), "train", game)
    with pytest.raises(ValueError, match="is played by"):
        game.roles(1)


@pytest.mark.parametrize(
    ("name", "row", "field"),
    [
        ("codebook", {"symbols": ["cat"], "symbol": "cat", "letters": 1}, "symbols"),
        ("codebook", {"symbols": [["a"], ["b"]], "symbol": ["a"], "letters": 1}, "symbols"),
        ("codebook", {"symbols": ["a", "b!"], "symbol": "a", "letters": 1}, "symbols"),
        ("codebook", {"symbols": ["a", "b"], "symbol": "c", "letters": 1}, "symbol"),
        ("codebook", {"symbols": ["a", "b"], "symbol": "a", "letters": 4}, "letters"),
        ("shards", {"numbers": [1, 1], "question": "largest"}, "numbers"),
        ("shards", {"numbers": [0, 1], "question": "pair"}, "numbers"),
        ("shards", {"numbers": [1.0, 2], "question": "largest"}, "numbers"),
        ("shards", {"numbers": [1, 2], "question": "mean"}, "question"),
        ("shards", {"numbers": [1, 2], "question": ["largest"]}, "question"),
        ("lock", {"secrets": [1, 3]}, "secrets"),
        ("lock", {"secrets": [[0], [1]]}, "secrets"),
        ("chores", {"numbered": 1}, "numbered"),
    ],
)
def test_bad_rows(name, row, field):
    with pytest.raises(ValueError, match=f"its field `{field}` "):
        ARENA[f"arena-{name}"].task("t", {"game": f"arena-{name}", **row})


def test_too_few_numbers():
    task = ARENA["arena-shards"].task(
        "t", {"game": "arena-shards", "numbers": [1, 2], "question": "largest"}
    )
    with pytest.raises(UserError, match="task 't' contains 2 numbers, and 3 agents hold one each"):
        Prompts(shards.SHARDS).first(task, 4)


def test_a_score_is_0_at_the_floor_and_1_at_the_optimum():
    bounds = Bounds(-3.0, 11.0)
    assert [bounds.score(value) for value in (-3.0, 11.0, 4.0, -10.0)] == [0, 1, 0.5, -0.5]
