"""`rayfcp.PlannerPool` on Ray: plans are those of `plan_batch`, in order and within bounds, whatever dies."""

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

import rayfcp
from rayfcp.cluster.actors.planner_pool import PlannerPool, Ticket
from rayfcp.cluster.errors import CapacityError
from rayfcp.plan import CostModel, hardware_profile, model_profile
from rayfcp.program import Programs
from rayfcp.values import BatchPlan, ClusterSpec, InfeasiblePlanError, SequenceSpec
from tests.cluster.processes import descendants, lives
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("ray_cluster")

CLUSTER = ClusterSpec(num_ranks=4, max_tokens_per_rank=4096)
COST = CostModel.from_profiles(
    model_profile("qwen3-1.7b"), hardware_profile("h100"), num_ranks=4, bytes_per_element=2, reduce_every="step"
)
LOOKAHEAD = 3

Batch = list[SequenceSpec]


def batch(*lengths: int) -> Batch:
    return [SequenceSpec(id=at, num_tokens=each, num_targets=each - 1) for at, each in enumerate(lengths)]


BATCHES = [batch(3000 + number, 900, *range(100, 1000, 130 + number)) for number in range(8)]


def expected(sequences: Batch, *, cluster: ClusterSpec = CLUSTER, cost: CostModel = COST) -> BatchPlan:
    return rayfcp.plan_batch(sequences, cluster=cluster, cost=cost)


def planners() -> list[int]:
    return descendants("ray::BatchPlanner")


def signalled(number: signal.Signals, processes: Sequence[int]) -> None:
    for each in processes:
        os.kill(each, number)


@pytest.fixture(scope="module")
def pool(ray_cluster: None) -> Iterator[PlannerPool]:
    with rayfcp.PlannerPool(cluster=CLUSTER, cost=COST, lookahead=LOOKAHEAD, programs=True) as made:
        yield made


@pytest.fixture
def stopped(pool: PlannerPool) -> Iterator[list[int]]:
    """Processes of the pool's planners, which answer nothing until the end of the test or SIGCONT."""
    processes = planners()
    signalled(signal.SIGSTOP, processes)
    yield processes
    signalled(signal.SIGCONT, [each for each in processes if lives(each)])


def test_plans_come_in_order_within_the_bound(pool: PlannerPool) -> None:
    pulled = 0

    def source() -> Iterator[Batch]:
        nonlocal pulled
        for each in BATCHES:
            pulled += 1
            yield each

    for number, planned in enumerate(pool.map(source())):
        assert pulled == min(number + 1 + LOOKAHEAD, len(BATCHES))
        assert planned.plan == expected(BATCHES[number]) and planned.plan_s <= planned.prepare_s
        assert planned.plan.plan_hash == expected(BATCHES[number]).plan_hash
    assert number == len(BATCHES) - 1


def test_programs_are_those_of_the_plan_by_reference(pool: PlannerPool) -> None:
    (planned,) = pool.map(BATCHES[:1])
    assert isinstance(planned.programs, ray.ObjectRef)
    programs = ray.get(planned.programs)
    assert isinstance(programs, Programs) and programs == rayfcp.lower(planned.plan, BATCHES[0])


@given(
    actions=st.lists(
        st.sampled_from(["submit", "submit", "take first", "take last", "slower", "wider"]), min_size=3, max_size=12
    )
)
def test_any_order_of_calls(pool: PlannerPool, actions: list[str]) -> None:
    """Every plan is of the facts that held when it was taken."""
    cluster, cost = CLUSTER, COST
    pool.update(cluster=cluster, cost=cost)
    held: list[tuple[Ticket, Batch]] = []
    for number, action in enumerate([*actions, *["take first"] * len(actions)]):
        if action == "submit":
            sequences = BATCHES[number % len(BATCHES)]
            held.append((pool.submit(sequences), sequences))
        elif action == "slower":
            cost = replace(cost, linear_s_per_token=2 * cost.linear_s_per_token)
            pool.update(cost=cost)
        elif action == "wider":
            cluster = replace(cluster, num_ranks=cluster.num_ranks + 1, generation=cluster.generation + 1)
            pool.update(cluster=cluster)
        elif held:
            ticket, sequences = held.pop(0 if action == "take first" else -1)
            assert pool.result(ticket).plan == expected(sequences, cluster=cluster, cost=cost)
            with pytest.raises(ValueError, match="taken already"):
                pool.result(ticket)
    pool.update(cluster=CLUSTER, cost=COST)


def test_a_batch_without_a_plan_says_so_and_others_go_on(pool: PlannerPool) -> None:
    too_long = pool.submit(batch(10**6))
    after = pool.submit(BATCHES[0])
    with pytest.raises(InfeasiblePlanError, match="1000000"):
        pool.result(too_long)
    assert pool.result(after).plan == expected(BATCHES[0])


def test_dead_planners_are_replaced_and_repeat_their_batches(pool: PlannerPool, stopped: list[int]) -> None:
    tickets = [pool.submit(each) for each in BATCHES[:LOOKAHEAD]]
    assert len(stopped) == 2
    signalled(signal.SIGKILL, stopped)
    plans = [pool.result(ticket).plan for ticket in tickets]
    assert plans == [expected(each) for each in BATCHES[:LOOKAHEAD]]
    assert len(planners()) == 2 and not set(planners()) & set(stopped)


def test_a_full_pool_refuses_until_planners_have_planned(pool: PlannerPool, stopped: list[int]) -> None:
    tickets = [pool.submit(each) for each in BATCHES[:LOOKAHEAD]]
    with pytest.raises(TimeoutError, match=f"lookahead is {LOOKAHEAD}.*raise num_planners"):
        pool.submit(BATCHES[LOOKAHEAD], timeout_s=0)
    with pytest.raises(TimeoutError, match=r"within 0\.01 s"):
        pool.result(tickets[0], timeout_s=0.01)
    assert pool._series.value("plan_queue_depth") == LOOKAHEAD
    signalled(signal.SIGCONT, stopped)
    tickets.append(pool.submit(BATCHES[LOOKAHEAD]))  # room without a result having been taken
    plans = [pool.result(ticket).plan for ticket in tickets]
    assert plans == [expected(each) for each in BATCHES[: LOOKAHEAD + 1]]
    assert pool._series.value("plan_queue_depth") == 0


def test_a_consumer_that_stops_early_leaves_room(pool: PlannerPool) -> None:
    for _ in pool.map(BATCHES):
        break
    assert [planned.plan for planned in pool.map(BATCHES[:2])] == [expected(each) for each in BATCHES[:2]]


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Ctrl-C interrupts, also where a shell started the tests in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_ctrl_c_leaves_nothing_behind(pool: PlannerPool) -> None:
    """Nor does the end of a block, and what has ended refuses calls."""
    before = set(planners())
    with pytest.raises(KeyboardInterrupt), PlannerPool(cluster=CLUSTER, cost=COST, num_planners=1) as own:
        (process,) = set(planners()) - before
        signalled(signal.SIGSTOP, [process])
        ticket = own.submit(BATCHES[0])
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        own.result(ticket)
    until(lambda: not lives(process), what="the planner lives")
    assert set(planners()) == before
    own.close()
    with pytest.raises(RuntimeError, match="closed"):
        own.submit(BATCHES[0])


def test_planners_that_get_no_cpu_are_an_error(pool: PlannerPool) -> None:
    before = planners()
    with pytest.raises(CapacityError, match=r"64 planners \(num_planners\) did not all start within 1 s"):
        PlannerPool(cluster=CLUSTER, cost=COST, num_planners=64, lookahead=64, start_timeout_s=1.0)
    until(lambda: planners() == before, what=lambda: str(planners()))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_planners": 0}, "num_planners is 0, must be at least 1"),
        ({"num_planners": 3, "lookahead": 2}, r"lookahead is 2, must be at least num_planners \(3\)"),
        ({"strategy": "fastest"}, "'fastest'"),
    ],
)
def test_what_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PlannerPool(cluster=CLUSTER, cost=COST, **wrong)


def test_metrics_are_served_where_asked(tmp_path: Path) -> None:
    with PlannerPool(cluster=CLUSTER, cost=COST, num_planners=1, run="host", run_dir=str(tmp_path)) as own:
        (planned,) = own.map(BATCHES[:1])
        assert planned.programs is None
        with urlopen(f"http://{own.target}/metrics") as answer:
            text = answer.read().decode()
    wanted = {"planners": 1.0, "plan_queue_depth": 0.0, "plan_seconds": planned.plan_s}
    wanted |= {"prepare_seconds": planned.prepare_s, "plan_wait_seconds": planned.wait_s}
    lines = text.splitlines()
    assert all(f'rayfcp_{name}{{run="host"}} {value}' in lines for name, value in wanted.items()), text
    assert not (tmp_path / "prometheus_sd.json").exists()
