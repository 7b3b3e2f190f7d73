"""Random facts for the tests of elastic decisions, and what is true of all that may be decided on them."""

from hypothesis import strategies as st

from rayfcp.elastic.facts import Cause, Device, Facts, Failure, Fit, Limits, Loss, Setbacks

NODES = ("n0", "n1", "n2", "n3")
NOW_S = 1000.0


def devices(*nodes: str, first: int = 0) -> tuple[Device, ...]:
    """One device for each name of a node: d0, d1, ..."""
    return tuple(Device(id=f"d{first + index}", node_id=node) for index, node in enumerate(nodes))


def running(*nodes: str, limits: Limits, gone: tuple[str, ...] = (), num_stages: int = 1, **more: object) -> Facts:
    """A generation of the devices d0, d1, ... on these nodes, of which `gone` are not healthy, and of which the ones
    after the last whole rank stand by."""
    have = devices(*nodes)
    per_rank = num_stages * limits.tensor_parallel
    used = min(len(have), limits.max_devices) // per_rank * per_rank
    return Facts(
        limits=limits,
        devices=tuple(each for each in have if each.id not in gone),
        active=tuple(each.id for each in have[:used]),
        num_stages=num_stages,
        **more,  # type: ignore[arg-type]
    )


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    num_stages, tensor_parallel = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    least = draw(st.integers(1, 5))
    return Limits(
        min_devices=least,
        max_devices=max(least, num_stages * tensor_parallel) + draw(st.integers(0, 8)),
        num_stages=num_stages,
        tensor_parallel=tensor_parallel,
        wait_s=draw(st.sampled_from([5.0, 60.0])),
        max_recoveries=draw(st.integers(1, 3)),
        grow=draw(st.booleans()),
        flap_losses=draw(st.integers(1, 3)),
    )


@st.composite
def failures(draw: st.DrawFn, ids: tuple[str, ...]) -> Failure:
    cause = draw(st.sampled_from(list(Cause)))
    lost = draw(st.sets(st.sampled_from(ids))) if ids else set()
    return Failure(cause=cause, lost=tuple(sorted(lost)), message="connection 1 closed by peer")


@st.composite
def worlds(draw: st.DrawFn) -> Facts:
    """Any facts: before the first generation, between steps, after failures, while waiting."""
    bounds = draw(limits())
    fits = [Fit(num_stages=bounds.num_stages, min_ranks=draw(st.integers(1, 2)))] + [
        Fit(num_stages=stages, min_ranks=draw(st.integers(1, 3)))
        for stages in range(1, bounds.num_stages)
        if draw(st.booleans())
    ]
    num_stages = draw(st.sampled_from(fits)).num_stages
    per_rank = num_stages * bounds.tensor_parallel
    count = per_rank * draw(st.integers(0, max(bounds.max_devices // per_rank, 1)))
    node = st.sampled_from(NODES)
    born = devices(*draw(st.lists(node, min_size=count, max_size=count)))
    alive = draw(st.sets(st.sampled_from(born))) if born and draw(st.booleans()) else set(born)
    others = draw(st.lists(node, max_size=6))
    extra = [Device(id=f"s{index}", node_id=each) for index, each in enumerate(others)]
    ids = tuple(each.id for each in born)
    return Facts(
        limits=bounds,
        fits=tuple(draw(st.permutations(fits))),
        devices=tuple(draw(st.permutations([*sorted(alive, key=lambda each: each.id), *extra]))),
        active=ids,
        num_stages=num_stages,
        leaving=dict.fromkeys(sorted(draw(st.sets(node, max_size=2))), NOW_S + 30),
        starting_since_s=tuple(draw(st.lists(st.floats(900, NOW_S), max_size=2))),
        replacing_since_s=tuple(draw(st.lists(st.floats(900, NOW_S), max_size=2))),
        losses=tuple(draw(st.lists(st.builds(Loss, place=node, at_s=st.floats(300, NOW_S)), max_size=5))),
        failure=draw(st.none() | failures(ids)),
        setbacks=Setbacks(recoveries=draw(st.integers(0, 2)), collectives=draw(st.integers(0, 2))),
        waiting_since_s=draw(st.none() | st.just(NOW_S - 1)),
    )


def usable(facts: Facts) -> set[str]:
    """Ids of devices that a decision may take."""
    given_up = facts.failure.lost if facts.failure else ()
    return {each.id for each in facts.devices if each.node_id not in facts.leaving} - set(given_up)


def is_calm(facts: Facts) -> bool:
    healthy = {each.id for each in facts.devices}
    return (
        bool(facts.active)
        and facts.failure is None
        and facts.waiting_since_s is None
        and all(each in healthy for each in facts.active)
    )
