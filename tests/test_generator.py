"""Decoding with mock policies: exact states, batches equal rows alone, determinism, few calls, raw and constrained."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.generator import Sessions, TraceGenerator, choose
from inference.traces import PlanParseError, TraceDraft, TracePlan
from tests.plan_tokenizers import MAKERS, neox, sound_plans, trained

QUERIES = ["Who founded Oriole Records?", "Where?", "And [A3] in\nthe UK, [PLAN]?", "日本?", "x" * 40]


@dataclass
class History:
    """The state of the mock policies is simply every token fed so far."""

    rows: list[tuple[int, ...]]

    def select(self, rows):
        return History([self.rows[row] for row in rows])

    @staticmethod
    def cat(parts):
        return History([row for part in parts for row in part.rows])


class Mock:
    """Logits are a fixed function of the history, row by row."""

    def __init__(self, tokens, spare=5):
        self.tokens, self.vocab_size, self.calls = tokens, tokens.n_tokens + spare, []

    def logits(self, history):
        raise NotImplementedError

    def new_states(self, n):
        return History([()] * n)

    def feed(self, states, token_ids):
        assert len(states.rows) == len(token_ids) > 0 and all(token_ids)
        self.calls.append([len(row) for row in token_ids])
        states = History([old + tuple(new) for old, new in zip(states.rows, token_ids, strict=True)])
        return torch.stack([self.logits(row) for row in states.rows]), states


class Noise(Mock):
    """Random logits seeded by the history, with a taste for ending fields and for brackets."""

    def logits(self, history):
        generator = torch.Generator().manual_seed(hash(history) % 2**31)
        logits_V = torch.randn(self.vocab_size, generator=generator)
        logits_V[list(self.tokens.structural.values())] += 2.5
        return logits_V


class Script(Mock):
    """Knows the token streams of some dialogues and continues whichever the history begins."""

    def __init__(self, tokens, streams, spare=5):
        super().__init__(tokens, spare)
        self.streams = streams

    def logits(self, history):
        logits_V = torch.zeros(self.vocab_size)
        logits_V[self.tokens.n_tokens :] = 50.0  # a padded vocabulary row never wins
        for stream in self.streams:
            if stream[: len(history)] == history and len(stream) > len(history):
                logits_V[stream[len(history)]] = 9.0
        return logits_V


def plan(*rows):
    return TracePlan(
        tuple(TraceDraft(own_id, question, keywords, deps) for own_id, question, keywords, deps in rows)
    )


TURNS = [
    (
        "Who founded Oriole?",
        plan((1, "Who founded Oriole?", "founded Oriole", ()), (2, "Where was [A1] born?", "born", (1,))),
    ),
    ("And that city?", plan((3, "What is near [A2]?", "near [A2]", (2, 1)))),
]


def stream_of(tokens, turns):
    ids = [tokens.bos_id]
    for query, turn_plan in turns:
        ids += tokens.encode_query(query) + tokens.encode_plan(turn_plan)[0]
    return tuple(ids)


@pytest.mark.parametrize("name", sorted(MAKERS))
@pytest.mark.parametrize("constrained", [True, False])
def test_a_policy_that_knows_the_dialogue_writes_it_turn_by_turn(name, constrained):
    tokens = MAKERS[name]()
    policy = Script(tokens, [stream_of(tokens, TURNS)])
    generator = TraceGenerator(policy, tokens)
    sessions = generator.start(1)
    for turn, (query, gold) in enumerate(TURNS):
        [result] = generator.generate(sessions, [query], constrained=constrained)
        assert result.valid and result.plan == gold and result.error is None
        assert list(result.token_ids) == tokens.encode_plan(gold)[0]
        assert sessions.states.rows[0] == stream_of(tokens, TURNS[: turn + 1])  # right after [/PLAN]
    assert sessions.next_id == [4]


def test_forced_tokens_ride_along():
    """The second trace's own id and [SubQ] are fed with [TRACE], so decisions are all that costs a call."""
    tokens = neox()
    stream = stream_of(tokens, TURNS)
    policy = Script(tokens, [stream])
    generator = TraceGenerator(policy, tokens)
    [result] = generator.generate(generator.start(1), [TURNS[0][0]])
    prompt = len(tokens.encode_query(TURNS[0][0])) + 1
    assert policy.calls[0] == [prompt + 4]  # [PLAN] [TRACE] 1 [SubQ]
    state = generator.grammar.start(1)
    decisions = 0
    for token in result.token_ids:
        decisions += state.forced() is None
        state.advance(token)
    assert len(policy.calls) == decisions + 1
    assert sum(sum(call) for call in policy.calls) == prompt + len(result.token_ids)
    assert [3] in policy.calls  # [TRACE] with its forced id and [SubQ]


@pytest.mark.parametrize("constrained", [True, False])
def test_ragged_rows_in_a_batch_equal_each_alone(constrained):
    tokens = trained()
    generator = TraceGenerator(Noise(tokens), tokens)
    batch, alone = generator.start(5), [generator.start(1) for _ in range(5)]
    options = {"constrained": constrained, "max_new_tokens": 70}
    for turn in range(3):
        queries = QUERIES[turn:] + QUERIES[:turn]
        together = generator.generate(batch, queries, **options)
        single = [
            generator.generate(one, [query], **options)[0] for one, query in zip(alone, queries, strict=True)
        ]
        assert together == single
        assert len({len(result.token_ids) for result in together}) > 1  # rows did end at different times
        assert batch.states.rows == [one.states.rows[0] for one in alone]
        assert batch.next_id == [one.next_id[0] for one in alone]
        if constrained:
            assert all(result.valid for result in together)


def test_the_state_is_the_history_up_to_the_rows_own_last_token():
    tokens = trained()
    generator = TraceGenerator(Noise(tokens), tokens)
    for constrained in (True, False):
        sessions = generator.start(5)
        results = generator.generate(sessions, QUERIES, constrained=constrained, max_new_tokens=60)
        for query, result, row in zip(QUERIES, results, sessions.states.rows, strict=True):
            assert row == (tokens.bos_id, *tokens.encode_query(query), *result.token_ids)
            if constrained:
                assert result.token_ids[-1] == tokens.structural["[/PLAN]"]


@settings(max_examples=25)
@given(
    st.sampled_from(sorted(MAKERS)), st.integers(0, 99), st.sampled_from([0.0, 0.7, 3.0]), st.integers(20, 60)
)
def test_constrained_plans_are_always_valid_within_the_budget(name, seed, temperature, budget):
    tokens = MAKERS[name]()
    generator = TraceGenerator(Noise(tokens), tokens)
    sessions = generator.start(4)
    sessions.next_id = [1, 9, 99, 120]
    draw = torch.Generator().manual_seed(seed)
    for _ in range(2):
        before = list(sessions.next_id)
        options = {"temperature": temperature, "max_new_tokens": budget, "generator": draw, "max_traces": 3}
        for result, first_id in zip(
            generator.generate(sessions, QUERIES[:4], **options), before, strict=True
        ):
            assert result.valid and result.plan and len(result.token_ids) <= budget and len(result.plan) <= 3
            assert result.plan.traces[0].id == first_id
        assert sessions.next_id > before


@pytest.mark.parametrize("constrained", [True, False])
def test_sampling_depends_on_the_generator_alone(constrained):
    tokens = trained()
    generator = TraceGenerator(Noise(tokens), tokens)

    def run(seed, global_seed):
        options = {"temperature": 1.0, "top_k": 40, "constrained": constrained, "max_new_tokens": 60}
        torch.manual_seed(global_seed)
        return generator.generate(
            generator.start(2), QUERIES[:2], generator=torch.Generator().manual_seed(seed), **options
        )

    assert run(1, 5) == run(1, 6)
    assert run(1, 5) != run(2, 5)


@settings(max_examples=20)
@given(st.lists(sound_plans(1), min_size=1, max_size=3))
def test_forcing_gold_plans_leaves_the_state_of_generating_them(cases):
    tokens = trained()
    plans = [case[1] for case in cases]
    generator = TraceGenerator(
        Script(tokens, [stream_of(tokens, [(f"q{i}", p)]) for i, p in enumerate(plans)]), tokens
    )
    forced, free = generator.start(len(plans)), generator.start(len(plans))
    queries = [f"q{i}" for i in range(len(plans))]
    generator.force(forced, queries, plans)
    results = generator.generate(free, queries)
    assert [result.plan for result in results] == plans
    assert forced == free


def test_forcing_refuses_a_plan_of_another_namespace():
    tokens = trained()
    generator = TraceGenerator(Noise(tokens), tokens)
    sessions = generator.start(2)
    with pytest.raises(PlanParseError, match="should have identifier 1"):
        generator.force(sessions, ["a", "b"], [TURNS[0][1], TURNS[1][1]])
    assert sessions == generator.start(2)


def test_an_invalid_raw_plan_keeps_its_state_and_the_counter():
    tokens = trained()
    [good, bad] = TURNS[0][1], plan((2, "Who?", "", ()))
    ids = tokens.encode_plan(good)[0]
    ends = tokens.structural["[/PLAN]"]
    streams = {
        "wrong id": (tokens.encode_plan(bad)[0], "should have identifier 1"),
        "eos": ([*ids[:7], tokens.bos_id], "cannot stand inside a plan"),
        "cut": ([*ids[:6], ends], "found [/PLAN]"),
        "no end": ([ids[0]] + [ids[5]] * 100, "no [/PLAN] within 80 tokens"),
    }
    known = [(tokens.bos_id, *tokens.encode_query(query), *stream) for query, (stream, _) in streams.items()]
    generator = TraceGenerator(Script(tokens, known), tokens)
    sessions = generator.start(len(streams))
    results = generator.generate(sessions, list(streams), constrained=False, max_new_tokens=80)
    for result, history, whole, (_, message) in zip(
        results, sessions.states.rows, known, streams.values(), strict=True
    ):
        assert not result.valid and result.plan is None and message in str(result.error)
        assert history == whole[: len(history)] and history[-len(result.token_ids) :] == result.token_ids
    assert sessions.next_id == [1] * 4 and sessions.started == [True] * 4
    assert all(result.valid for result in generator.generate(sessions, ["again"] * 4, max_new_tokens=40))


def test_sessions_fork_and_join():
    tokens = trained()
    generator = TraceGenerator(Noise(tokens), tokens)
    sessions = generator.start(2)
    generator.generate(sessions, QUERIES[:2], max_new_tokens=40)
    fork = sessions.select([1, 1])
    generator.generate(fork, ["left", "right"], max_new_tokens=40)
    joined = Sessions.cat([fork, sessions])
    assert joined.next_id == fork.next_id + sessions.next_id and len(joined) == 4
    assert joined.states.rows[2:] == sessions.states.rows
    assert fork.states.rows[0][: len(sessions.states.rows[1])] == sessions.states.rows[1]
    generator.generate(joined, list("abcd"), max_new_tokens=40)


def test_no_sessions_is_no_work():
    generator = TraceGenerator(Noise(trained()), trained())
    assert generator.generate(generator.start(0), []) == []
    generator.force(generator.start(0), [], [])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"queries": ["one"]}, "2 sessions need as many queries, got 1"),
        ({"queries": "ab"}, "got one string"),
        ({"temperature": -1.0}, "temperature -1.0"),
        ({"top_k": 0}, "top_k 0"),
        ({"max_new_tokens": 5}, "takes 9 tokens or more, not 5"),
        ({"max_new_tokens": 0}, "must be at least 1"),
    ],
)
def test_bad_arguments_are_named_and_nothing_moves(options, message):
    generator = TraceGenerator(Noise(trained()), trained())
    sessions = generator.start(2)
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        generator.generate(sessions, **({"queries": ["a", "b"]} | options))
    assert sessions == generator.start(2)


def test_choose_greedy_takes_the_best_allowed_and_the_lowest_id_on_ties():
    logits_BV = torch.tensor([[1.0, 5.0, 3.0, 3.0], [0.0, 0.0, 0.0, 9.0]])
    mask = torch.tensor([True, False, True, True])
    assert choose(logits_BV, [mask, mask]) == [2, 3]
    assert choose(logits_BV, [mask, ~mask]) == [2, 1]


def test_choose_samples_the_softmax_of_the_allowed():
    """Frequencies of 20,000 draws: within 4 standard errors of softmax(logits / T) over allowed tokens, top-k kept."""
    logits_V = torch.tensor([1.0, 9.0, 2.0, 0.0, -1.0])
    mask = torch.tensor([True, False, True, True, True])
    n = 20_000
    for temperature, top_k, kept in [(1.0, None, [0, 2, 3, 4]), (2.0, 2, [0, 2]), (0.5, 99, [0, 2, 3, 4])]:
        draws = choose(
            logits_V.expand(n, -1), [mask] * n, temperature, top_k, torch.Generator().manual_seed(0)
        )
        share_V = torch.bincount(torch.tensor(draws), minlength=5) / n
        wanted_V = torch.zeros(5)
        wanted_V[kept] = (logits_V[kept] / temperature).softmax(-1)
        error_V = 4 * (wanted_V * (1 - wanted_V) / n).sqrt()
        assert ((share_V - wanted_V).abs() <= error_V).all()
        assert share_V[1] == 0
