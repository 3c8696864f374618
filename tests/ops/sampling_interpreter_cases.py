"""The sampler's kernels against their plain twin, `sampling/sampler.py`, under Triton's interpreter."""

import os
from dataclasses import replace

import pytest
import torch

from nanovllm.ops.sampler_state import COUNTED, RECENT
from nanovllm.ops.triton import sampling as kernels
from nanovllm.ops.triton.sampling_report import Reports, report
from nanovllm.sampling.rows import bits_of
from nanovllm.sampling.sampler import sample
from tests.ops.sampler_rig import KINDS, NUM_OUTPUT, NUM_PROMPT, make_logits, make_rows, make_state, sender

assert os.environ.get("TRITON_INTERPRET") == "1", "run through test_triton_interpreter.py"
torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("kind", "vocab", "dtype"),
    [
        ("normal", 2049, torch.float32),
        ("flat", 300, torch.bfloat16),
        ("flat", 4100, torch.bfloat16),
        ("peaked", 300, torch.float32),
        ("ties", 600, torch.bfloat16),
        ("equal", 257, torch.bfloat16),
        ("broken", 600, torch.bfloat16),
    ],
)
def test_every_kind_of_request(kind, vocab, dtype):
    torch.manual_seed(0)
    rows = make_rows(vocab)
    places = torch.randperm(len(rows)).tolist()
    held = make_state(rows, vocab, places)
    state = held.state
    logits = make_logits(kind, len(rows) + 1, vocab + 8, dtype)  # the last line is padding, and so are eight columns
    lanes = torch.tensor([*places, -1], dtype=torch.int32)
    positions = torch.tensor([*(len(row.token_ids) for row in rows), 0], dtype=torch.int32)
    drawn = kernels.draw(logits, lanes, positions, state)
    reports = Reports.allocate(len(rows), 2, logits.device)
    report(logits, lanes, drawn, state, reports, 1)
    expected = sample(logits[:-1, :vocab].clone(), rows)
    got = drawn.tokens[:-1].tolist()
    wrong = [(KINDS[i], a, b) for i, (a, b) in enumerate(zip(got, expected.token_ids)) if a != b]
    assert not wrong
    for lane, (row, wanted) in enumerate(zip(rows, expected.logprobs)):
        if wanted is None:
            continue
        assert reports.ids[lane, 1, 0] == wanted.positions[0]
        assert reports.logprobs[lane, 1, 0].item() == pytest.approx(wanted.logprobs[0], abs=1e-4)
        tops = reports.ids[lane, 1, 1 : 1 + row.params.logprobs].tolist()
        assert [token for token in tops if token != got[lane]] == wanted.token_ids[1:]
    # What the rows remember: the counts of those with penalties, and the newest tokens of all.
    for lane, (row, place, token) in enumerate(zip(rows, places, got)):
        assert state.recent[place, positions[lane] % RECENT] == token
        if row.params.repetition_penalty != 1.0:
            assert state.counts[place].sum() == row.num_output + 1
            assert state.counts[place, token] >= 1
            assert state.ints[place, COUNTED] == positions[lane]


@pytest.mark.parametrize(("kind", "vocab"), [("normal", 700), ("flat", 300), ("ties", 600)])
def test_guesses_are_seen_as_output(kind, vocab):
    """Several lanes of a row, each after one guess more: penalties count them, bad words end with them, and each lane
    has a mask of its own. Nothing is counted."""
    torch.manual_seed(2)
    num, first = 3, NUM_PROMPT + NUM_OUTPUT - 3
    whole = make_rows(vocab, seed=4)
    for row in whole[::3]:
        row.token_ids[first + 1 :] = row.token_ids[first]  # the same guess three times
    places = torch.randperm(len(whole)).tolist()
    certain = [row._replace(token_ids=row.token_ids[:first]) for row in whole]
    held = make_state(certain, vocab, places, num_guesses=len(whole) * (1 + num))
    state = held.state
    rows, masks = [], []
    logits = make_logits(kind, len(whole) * (1 + num), vocab, torch.float32)
    for number, (row, place) in enumerate(zip(whole, places)):
        for count in range(1 + num):
            params, line = row.params, place
            if params.allowed_token_ids is not None:
                allowed = [7 * count + 1, 9, 50 + count, 200]
                params, line = (
                    replace(params, allowed_token_ids=allowed),
                    len(state.floats) + (1 + num) * number + count,
                )
                held.send_masks([line], bits_of(allowed, vocab)[None], sender("cpu"))
            rows.append(row._replace(params=params, token_ids=row.token_ids[: first + count]))
            masks.append(line)
        state.recent[place] = int(logits[(1 + num) * number].argmax())  # old tokens, of which none counts
        for at in range(first, first + num):
            state.recent[place, at % RECENT] = int(row.token_ids[at])
    before = state.counts.clone(), state.ints.clone()
    lanes = torch.tensor(places, dtype=torch.int32).repeat_interleave(1 + num)
    positions = torch.tensor([len(row.token_ids) for row in rows], dtype=torch.int32)
    lines = torch.tensor(masks, dtype=torch.int32)
    recent = state.recent.clone()
    got = []
    for i in range(1 + num):  # on a card lanes of one row run together; here what one draws must not reach the others
        state.recent.copy_(recent)
        own, where, at, line = (part[i :: 1 + num].contiguous() for part in (logits, lanes, positions, lines))
        got.append(kernels.draw(own, where, at, state, line).tokens)
    expected = sample(logits.clone(), rows).token_ids
    wrong = [
        (i, KINDS[i // 4]) for i, token in enumerate(torch.stack(got, 1).flatten().tolist()) if token != expected[i]
    ]
    assert not wrong
    assert torch.equal(state.counts, before[0])
    assert torch.equal(state.ints, before[1])


def test_a_row_does_not_depend_on_its_neighbours_or_its_place():
    torch.manual_seed(1)
    vocab, rows = 700, make_rows(700, seed=3)
    logits = make_logits("normal", len(rows), vocab, torch.float32)
    positions = torch.tensor([len(row.token_ids) for row in rows], dtype=torch.int32)

    def draw(chosen, shift):
        held = make_state([rows[i] for i in chosen], vocab, [shift + n for n in range(len(chosen))])
        lanes = torch.arange(shift, shift + len(chosen), dtype=torch.int32)
        return kernels.draw(logits[chosen], lanes, positions[chosen], held.state).tokens.tolist()

    whole = draw(list(range(len(rows))), 0)
    for chosen in ([3, 2], [12, 0, 13], [8]):
        assert draw(chosen, 5) == [whole[i] for i in chosen]


def test_rows_with_nothing_left():
    vocab, rows = 300, make_rows(300)[:4]
    logits = torch.full((4, vocab), float("-inf"))
    logits[1] = float("nan")
    held = make_state(rows, vocab, [0, 1, 2, 3])
    lanes = torch.arange(4, dtype=torch.int32)
    assert kernels.draw(logits, lanes, lanes + 11, held.state).tokens.tolist() == [0, 0, 0, 0]
