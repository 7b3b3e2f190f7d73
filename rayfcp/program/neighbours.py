"""That a stage takes from its neighbours what it needs, and hands on what they need, once each and in its place."""

from collections.abc import Iterator

from rayfcp.program.instructions import Backward, Flow, Forward, RankProgram, Receive, Send

_HandOver = tuple[type[Send] | type[Receive], Flow, int]
"""Kind, flow, neighbouring stage."""


def check_neighbours(program: RankProgram) -> None:
    """Each microbatch is received before its pass and sent on after it, where there is a stage to do so with.

    Activations go from stage p to p + 1 and their gradients back, all tokens of the microbatch at once. The first
    stage receives no activations and sends no gradients, the last one the other way round. `check_order` found each
    pass once.

    Raises:
        ValueError: a Send or Receive is missing, double, out of place, of another size or with another stage.
    """
    due = set(_due(program.stage, num_stages=program.num_stages))
    tokens: dict[int, int] = {}
    passes: dict[tuple[int, Flow], int] = {}
    found: dict[tuple[int, _HandOver], int] = {}
    for at, item in enumerate(program.instructions):
        if isinstance(item, Forward):
            tokens[item.microbatch] = item.attention.num_tokens
            passes[item.microbatch, Flow.ACTIVATION] = at
        elif isinstance(item, Backward):
            passes[item.microbatch, Flow.GRADIENT] = at
        elif isinstance(item, Send | Receive):
            key = item.microbatch, (type(item), item.flow, item.stage)
            if key[1] not in due or key in found:
                raise ValueError(
                    f"{program.place}: {_words(*key)} is {'double' if key in found else 'not due'}; must be one of "
                    f"{[_words(item.microbatch, each) for each in sorted(due, key=str)]}, once; lower the plan again"
                )
            found[key] = at
    for microbatch, num_tokens in tokens.items():
        for each in due:
            if (microbatch, each) not in found:
                raise ValueError(f"{program.place}: {_words(microbatch, each)} is missing; lower the plan again")
            passed = passes[microbatch, each[1]]
            _check_place(program, found[microbatch, each], passed, num_tokens=num_tokens)
    if strange := [_words(*key) for key in found if key[0] not in tokens]:
        raise ValueError(f"{program.place}: {strange[0]} belongs to no Forward; lower the plan again")


def _due(stage: int, *, num_stages: int) -> Iterator[_HandOver]:
    if stage > 0:
        yield Receive, Flow.ACTIVATION, stage - 1
        yield Send, Flow.GRADIENT, stage - 1
    if stage + 1 < num_stages:
        yield Send, Flow.ACTIVATION, stage + 1
        yield Receive, Flow.GRADIENT, stage + 1


def _check_place(program: RankProgram, at: int, passed: int, *, num_tokens: int) -> None:
    item = program.instructions[at]
    assert isinstance(item, Send | Receive)
    words = _words(item.microbatch, (type(item), item.flow, item.stage))
    if (at < passed) is isinstance(item, Send):
        raise ValueError(
            f"{program.place}: {words} is {'before' if at < passed else 'after'} the pass that it belongs to; receive "
            "before, send after it"
        )
    if item.num_tokens != num_tokens:
        raise ValueError(
            f"{program.place}: {words} is of {item.num_tokens} tokens, must be the microbatch's {num_tokens}; "
            "lower the plan again"
        )


def _words(microbatch: int, hand_over: _HandOver) -> str:
    kind, flow, stage = hand_over
    way = "to" if kind is Send else "from"
    return f"{kind.__name__} of the {flow.value} of microbatch {microbatch} {way} stage {stage}"
