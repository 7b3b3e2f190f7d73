"""Reactions of a run to a single event: decisions, their reasons, steps that run again."""

from rayfcp.cluster.runtime import Role
from rayfcp.telemetry.events import EventKind
from tests.simulated.run import Result
from tests.simulated.scenario import ended_well, fault, of, ran
from tests.simulated.schedule import Kind


def test_nothing_happens() -> None:
    result = ran()
    ended_well(result)
    assert [each.kind for each in result.events] == [EventKind.START, EventKind.END]
    assert {each.world_size for each in result.reports} == {4} and not any(each.recovered for each in result.reports)
    finished = result.outcome.finished
    assert finished is not None and str(finished.checkpoint).endswith("step-00000030")
    assert abs(finished.controller_s) < 1e-6, "the clock of the simulation stands still while the controller works"
    assert result.num_planned == 30


def test_a_dead_worker_costs_no_finished_step_and_is_replaced() -> None:
    result = ran(fault(Kind.WORKER_DIES, 10))
    ended_well(result)
    (recovery,) = of(result, EventKind.RECOVERY)
    assert (recovery.devices, recovery.devices_before, recovery.cause, recovery.lost_steps) == (3, 4, "died", 0)
    assert "1 device died (rank " in recovery.reason and "continuing with 3 devices as 3 ranks" in recovery.reason
    assert [(each.devices_before, each.devices) for each in of(result, EventKind.RESIZE)] == [(3, 4)]
    again = [each.step for each in result.reports if each.recovered]
    assert again == [10], "the step under way runs again, no other"


def test_half_a_tensor_parallel_rank_stands_by_until_it_is_whole() -> None:
    result = ran(fault(Kind.WORKER_DIES, 10), cluster={"tensor_parallel": 2}, workers=(2, 4), steps=60)
    ended_well(result, steps=60)
    (recovery,) = of(result, EventKind.RECOVERY)
    assert "continuing with 2 devices as 1 rank, 1 standing by" in recovery.reason
    assert [each.world_size for each in result.reports if each.step in (9, 10, 60)] == [4, 2, 4]


def test_stages_are_given_up_where_devices_are_too_few_and_come_back() -> None:
    result = ran(
        fault(Kind.TWO_WORKERS_DIE, 10),
        cluster={"pipeline_stages": 4},
        workers=(4, 4),
        steps=60,
        elastic={"min_workers": 1},
    )
    ended_well(result, steps=60)
    (recovery,) = of(result, EventKind.RECOVERY)
    assert (recovery.devices, recovery.devices_before) == (2, 4) and "as 1 rank in 2 stages" in recovery.reason
    assert result.reports[-1].world_size == 4


def test_the_devices_of_a_lost_node_come_back_elsewhere() -> None:
    result = ran(fault(Kind.NODE_DIES, 10), nodes=(2, 2, 2), steps=60)
    ended_well(result, steps=60)
    (recovery,) = of(result, EventKind.RECOVERY)
    assert recovery.cause == "node" and recovery.devices_before == 4 and recovery.lost_steps <= 1
    assert result.reports[-1].world_size == 4


def test_a_node_that_leaves_is_left_in_time() -> None:
    result = ran(fault(Kind.NODE_DRAINS, 10), nodes=(2, 2, 2), steps=60)
    ended_well(result, steps=60)
    # A plan that lies on the node when it goes is made again.
    assert all("an argument is lost" in each.reason and not each.lost_steps for each in of(result, EventKind.RECOVERY))
    first = of(result, EventKind.RESIZE)[0]
    assert "on nodes to be removed" in first.reason and first.lost_steps == 0
    assert result.reports[-1].world_size == 4


def test_a_resize_that_loses_steps_goes_on_from_the_state_that_is_left() -> None:
    """Copies are slow to reach their stores, and the node that leaves dies before it was announced to."""
    for seed in range(30):
        result = ran(
            fault(Kind.NODE_DIES_AS_IT_IS_LEFT, 10),
            nodes=(2, 2, 2),
            seed=seed,
            push_s=2.0,
            elastic={"snapshot_every_steps": 5},
        )
        lossy = [each for each in of(result, EventKind.RESIZE) if each.lost_steps]
        if lossy:
            ended_well(result)
            assert lossy[0].step + lossy[0].lost_steps in (10, 11)
            return
    raise AssertionError("no schedule is of this kind")


def test_the_run_grows_when_a_node_comes() -> None:
    result = ran(fault(Kind.NODE_COMES, 5), workers=(1, 8), nodes=(2,), steps=40, seed=3)
    ended_well(result, steps=40)
    grown = of(result, EventKind.RESIZE)
    assert grown and all(each.devices > each.devices_before for each in grown)
    assert result.reports[0].world_size == 2 < result.reports[-1].world_size
    assert result.most_requested == 8, "of the autoscaler"
    assert not any(each.recovered for each in result.reports)


def test_it_does_not_grow_where_that_is_off() -> None:
    result = ran(fault(Kind.NODE_COMES, 5), workers=(1, 8), nodes=(2,), steps=40, seed=3, elastic={"grow": False})
    ended_well(result, steps=40)
    assert {each.world_size for each in result.reports} == {2} and not of(result, EventKind.RESIZE)
    assert result.most_requested == 0


def test_a_stopped_worker_is_found_by_its_silence() -> None:
    result = ran(fault(Kind.WORKER_STOPS, 10, lasts_s=1e6), seed=2)
    ended_well(result)
    (recovery,) = of(result, EventKind.RECOVERY)
    assert recovery.cause == "hung" and "have not answered" in recovery.reason


def test_a_worker_whose_program_hangs_is_found_though_it_answers() -> None:
    result = ran(fault(Kind.WORKER_DEADLOCKS, 10))
    ended_well(result)
    (recovery,) = of(result, EventKind.RECOVERY)
    assert recovery.cause == "hung" and "do not wait for others" in recovery.reason


def test_a_lost_message_blames_no_device() -> None:
    result = ran(fault(Kind.EXCHANGE_STUCK, 10))
    ended_well(result)
    (recovery,) = of(result, EventKind.RECOVERY)
    assert (recovery.cause, recovery.devices, recovery.devices_before) == ("collective", 4, 4)
    assert "wait for each other" in recovery.reason and not of(result, EventKind.RESIZE)


def test_a_failed_exchange_is_tried_again_with_the_same_devices() -> None:
    result = ran(fault(Kind.EXCHANGE_FAILS, 10))
    ended_well(result)
    (recovery,) = of(result, EventKind.RECOVERY)
    assert (recovery.cause, recovery.devices, recovery.lost_steps) == ("collective", 4, 0)


def test_all_workers_die_at_once_and_no_step_is_lost() -> None:
    result = ran(fault(Kind.ALL_WORKERS_DIE, 10), elastic={"min_workers": 4})
    ended_well(result)
    (recovery,) = of(result, EventKind.RECOVERY)
    assert recovery.lost_steps <= 1 and recovery.devices == 4
    assert any("4 fresh processes starting" in line for line in result.lines), "it says what it waits for"


def test_without_copies_it_goes_on_from_the_checkpoint() -> None:
    result = ran(
        fault(Kind.ALL_WORKERS_DIE, 10), elastic={"snapshot_every_steps": 0}, checkpoint={"every_steps": 4, "keep": 2}
    )
    ended_well(result)
    (recovery,) = of(result, EventKind.RECOVERY)
    assert recovery.step in (4, 8) and recovery.lost_steps == 9 - recovery.step
    assert any(f"resuming from the checkpoint of step {recovery.step}" in line for line in result.lines)
    recovered = [each.step for each in result.reports if each.recovered]
    assert recovered == [10], "steps in the log keep their first line"


def test_with_neither_copies_nor_checkpoint_it_begins_again() -> None:
    result = ran(fault(Kind.ALL_WORKERS_DIE, 5), elastic={"snapshot_every_steps": 0})
    ended_well(result)
    assert of(result, EventKind.RECOVERY)[0].step == 0
    assert any("from the beginning, as there is no checkpoint" in line for line in result.lines)


def a_node_lost(*, comes_back: bool) -> Result:
    """A run that needs all of its devices loses half of them."""
    for seed in range(30):
        result = ran(fault(Kind.NODE_DIES, 10), elastic={"min_workers": 4}, seed=seed)
        if (result.outcome.finished is not None) == comes_back:
            return result
    raise AssertionError("no schedule is of this kind")


def test_devices_that_are_missing_are_waited_for() -> None:
    result = a_node_lost(comes_back=True)
    ended_well(result)
    assert any("2 devices can be used, 4 needed to continue; waited 0 s" in line for line in result.lines)
    assert of(result, EventKind.RECOVERY)[0].devices == 4


def test_a_run_gives_up_in_the_end_and_those_who_are_left_save_before() -> None:
    result = a_node_lost(comes_back=False)
    assert "none came in elastic.wait_s (60 s)" in result.outcome.error and not result.outcome.trace
    saved = [step for step in (9, 10) if f"; step {step} is saved in " in result.outcome.error]
    assert saved and result.reports[-1].step >= saved[0]


def test_another_controller_adopts_the_workers() -> None:
    result = ran(fault(Kind.CONTROLLER_DIES, 10))
    ended_well(result)
    starts = of(result, EventKind.START)
    assert len(starts) == 2 and starts[1].step == 9, "the last step that was written down, from copies in memory"
    assert any(line.startswith("adopting 4 workers of a lost controller") for line in result.lines)
    assert any("starts again, 1 more times at most" in line for line in result.lines)


def test_a_device_that_stands_by_is_kept_alive_by_the_next_controller() -> None:
    """One of three makes no rank; nobody calls it but to keep it alive."""
    result = ran(fault(Kind.CONTROLLER_DIES, 5), cluster={"tensor_parallel": 2}, workers=(2, 3), nodes=(3,), steps=80)
    ended_well(result, steps=80)
    assert any(line.startswith("adopting 3 workers") for line in result.lines)


def test_ctrl_c_at_the_start_ends_it_also_where_the_controller_dies_meanwhile() -> None:
    for faults in ((), (fault(Kind.CONTROLLER_DIES, 0, 0.002),), (fault(Kind.CONTROLLER_DIES, 0, 0.1),)):
        result = ran(*faults, interrupts=1)
        assert result.outcome.finished is not None and result.outcome.finished.last_step == 0, result.outcome
        assert sum("again stops at once" in line for line in result.lines) == 1


def test_a_driver_that_is_started_again_adopts_the_workers() -> None:
    """A retried job adopts them, unless it comes so late that they have ended: then it begins with new ones."""
    adopted = set()
    for seed in range(8):
        result = ran(fault(Kind.DRIVER_DIES, 10), seed=seed, checkpoint={"every_steps": 4})
        ended_well(result)
        second = of(result, EventKind.START)[1]
        is_adopted = any(line == "adopting 4 workers of a lost controller" for line in result.lines)
        assert second.step in (9, 10), second
        adopted.add(is_adopted)
    assert adopted == {True, False}


def test_copies_outlive_a_driver_while_new_workers_are_slow_to_start() -> None:
    """All workers are dead, and one of the new ones hangs for longer than a store waits for a controller."""
    for seed in range(6):
        result = ran(
            fault(Kind.START_HANGS, 10),
            fault(Kind.ALL_WORKERS_DIE, 0, 0.0),
            fault(Kind.DRIVER_DIES, 0, 0.0),
            nodes=(4, 4),
            elastic={"grow": False},
            seed=seed,
        )
        ended_well(result)
        if of(result, EventKind.START)[1].step > 0:
            return
    raise AssertionError("no schedule is of this kind")


def test_a_device_that_dies_after_its_own_call_ended_is_found_while_others_wait_for_it() -> None:
    """It dies while the devices of a generation meet."""
    for number in range(20):
        again = fault(Kind.NEWEST_WORKER_DIES, 0, 0.08 + 0.001 * number)
        result = ran(fault(Kind.WORKER_DIES, 5), again, workers=(1, 3), nodes=(1, 2), steps=8, seed=1)
        ended_well(result, steps=8)
        assert all(each.seconds < 60 for each in result.events), "long before elastic.rebuild_timeout_s"


def test_the_autoscaler_makes_no_room_for_a_run_that_is_over() -> None:
    """Not even that which a controller that was lost asked for. Checked at the end of every run."""
    ended_well(ran(fault(Kind.WORKER_DIES, 10), fault(Kind.CONTROLLER_DIES, 0, 1.0)))


def test_a_controller_is_not_started_again_for_ever() -> None:
    result = ran(*(fault(Kind.CONTROLLER_DIES, step) for step in (5, 10, 15)))
    assert result.outcome.finished is None
    assert result.outcome.error.startswith("the controller was lost once more than it may be started again")


def test_a_lost_store_is_replaced_between_steps() -> None:
    result = ran(fault(Kind.STORE_DIES, 10))
    ended_well(result)
    assert not of(result, EventKind.RECOVERY)


def test_copies_are_safe_again_after_a_store_was_lost() -> None:
    """All workers die ten steps after a store did: its copies are held by another by then."""
    result = ran(fault(Kind.STORE_DIES, 5), fault(Kind.ALL_WORKERS_DIE, 15))
    ended_well(result)
    (recovery,) = of(result, EventKind.RECOVERY)
    assert recovery.lost_steps <= 1


def test_a_planner_that_dies_is_replaced_without_a_recovery() -> None:
    result = ran(fault(Kind.PLANNER_DIES, 10), fault(Kind.PLANNER_DIES, 15))
    ended_well(result)
    assert not of(result, EventKind.RECOVERY)
    assert sum("a new one repeats" in line for line in result.lines) in (1, 2)
    assert result.num_planned <= 30 + 2, "what was there, or in the hands of the other planner, is not planned again"


def test_planners_that_die_again_and_again_end_the_run() -> None:
    again = [fault(Kind.PLANNER_DIES, 0, 0.7) for _ in range(20)]
    result = ran(fault(Kind.PLANNER_DIES, 5), *again, plan_s=5.0, plan={"planner_actors": 1})
    assert result.outcome.finished is None and not result.outcome.trace
    assert result.outcome.error.startswith("4 planners died in a row, at most 3 may")


def test_an_error_of_the_program_ends_the_run_with_its_cause() -> None:
    result = ran(fault(Kind.PROGRAM_FAILS, 10))
    assert result.outcome.finished is None and not of(result, EventKind.RECOVERY)
    assert "rank 0 failed: ZeroDivisionError" in result.outcome.error


def test_the_user_may_stop_while_the_run_waits_for_devices() -> None:
    for seed in range(30):
        result = ran(
            fault(Kind.NODE_DIES, 10),
            fault(Kind.USER_STOPS, 0, 8.0),
            elastic={"min_workers": 4},
            checkpoint={"every_steps": 4},
            seed=seed,
        )
        assert result.outcome.finished is not None
        if any("needed to continue" in line for line in result.lines):
            assert result.outcome.finished.last_step in (4, 8, 9, 10)
            assert str(result.outcome.finished.checkpoint).endswith(f"{result.outcome.finished.last_step:08d}")
            return
    raise AssertionError("no schedule is of this kind")


def test_a_last_save_that_fails_is_an_error_and_names_the_newest_good_checkpoint() -> None:
    result = ran(fault(Kind.DISK_FULL, 29, lasts_s=1e6), checkpoint={"every_steps": 10})
    assert result.outcome.finished is None and not result.outcome.trace
    assert result.outcome.error.startswith("the last checkpoint, of step 30, could not be written")
    assert "step-00000020" in result.outcome.error


def test_a_full_disk_stops_no_training() -> None:
    result = ran(fault(Kind.DISK_FULL, 5, lasts_s=4.0), checkpoint={"every_steps": 3, "keep": 2, "max_failures": 30})
    ended_well(result)
    assert any("could not be written" in line for line in result.lines)


def test_a_disk_that_stays_full_ends_the_run_with_one_line() -> None:
    result = ran(fault(Kind.DISK_FULL, 5, lasts_s=1e6), checkpoint={"every_steps": 2, "max_failures": 1})
    assert result.outcome.finished is None and not result.outcome.trace
    assert result.outcome.error.startswith("2 checkpoints in a row could not be written, checkpoint.max_failures is 1")


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken() -> None:
    result = ran(
        fault(Kind.CHECKPOINT_DAMAGED, 16), checkpoint={"every_steps": 4, "keep": 2}, workers=(2, 2), nodes=(2,)
    )
    ended_well(result)
    (recovery,) = of(result, EventKind.RECOVERY)
    assert recovery.step in (4, 8) and any("is damaged: " in line for line in result.lines)


def test_ctrl_c_ends_after_the_step_with_a_checkpoint() -> None:
    result = ran(fault(Kind.USER_STOPS, 10))
    assert result.outcome.finished is not None and result.outcome.finished.last_step in (10, 11)
    assert str(result.outcome.finished.checkpoint).endswith(f"step-{result.outcome.finished.last_step:08d}")


def test_updates_with_numbers_that_are_not_finite_are_left_out() -> None:
    result = ran(skipped=frozenset({7}))
    ended_well(result)
    assert any(line.startswith("step 7: loss is nan") for line in result.lines)


def losses_every(gap_s: float) -> Result:
    """Nine of twelve devices die, one after the other."""
    faults = [fault(Kind.WORKER_DIES, 10), *(fault(Kind.WORKER_DIES, 0, gap_s) for _ in range(8))]
    return ran(*faults, workers=(1, 12), nodes=(6, 6), elastic={"max_recoveries": 2})


def test_too_many_recoveries_without_a_step_end_the_run() -> None:
    result = losses_every(0.3)
    assert result.outcome.finished is None and not result.outcome.trace
    assert result.outcome.error.startswith("2 recoveries did not finish a step, elastic.max_recoveries is 2")
    assert result.reports[-1].step == 9 and len(of(result, EventKind.RECOVERY)) == 2


def test_recoveries_that_finish_steps_end_no_run() -> None:
    result = losses_every(2.0)
    ended_well(result)
    assert len(of(result, EventKind.RECOVERY)) > 2


def test_a_worker_that_does_not_start_is_asked_for_again() -> None:
    result = ran(fault(Kind.START_FAILS, 5), steps=60)
    ended_well(result, steps=60)
    assert result.reports[-1].world_size == 4


def test_workers_that_do_not_start_are_asked_for_at_growing_intervals() -> None:
    """Three fail to start, so there are pauses of 1, 2 and 4 s."""
    again = [fault(Kind.START_FAILS, 0, 0.0) for _ in range(2)]
    result = ran(fault(Kind.START_FAILS, 5), *again, nodes=(4,), steps=80)
    ended_well(result, steps=80)
    (recovery,), whole = of(result, EventKind.RECOVERY), of(result, EventKind.RESIZE)[-1]
    assert (recovery.devices, whole.devices) == (1, 4) and 4.3 <= whole.at_s - recovery.at_s < 20.0


def test_a_device_that_stands_by_leaves_its_node_before_that_goes() -> None:
    trace: list[str] = []
    result = ran(
        fault(Kind.NODE_DRAINS, 5), cluster={"tensor_parallel": 2}, workers=(2, 3), nodes=(2, 1), steps=80, trace=trace
    )
    ended_well(result, steps=80)
    assert any("n001 dies" in line for line in trace)
    assert not [line for line in trace if "dies: worker" in line and "(node)" in line]


def test_a_worker_that_hangs_while_it_starts_gives_its_device_back() -> None:
    result = ran(fault(Kind.START_HANGS, 5), nodes=(4,), steps=300)
    ended_well(result, steps=300)
    assert result.reports[-1].world_size == 4


def test_checkpoints_are_kept_as_configured() -> None:
    result = ran(checkpoint={"every_steps": 5, "keep": 2})
    ended_well(result)
    assert result.checkpoints == (25, 30)


def test_a_leaving_node_is_announced_with_its_time() -> None:
    result = ran(fault(Kind.NODE_DRAINS, 10, lasts_s=30.0), nodes=(2, 2, 2), steps=60)
    first = of(result, EventKind.RESIZE)[0]
    assert any(f"the first in {left} s" in first.reason for left in (28, 29, 30)), first.reason


def test_a_slow_device_gets_less_work_and_the_user_is_told() -> None:
    result = ran(fault(Kind.WORKER_SLOWS, 10), steps=60, workers=(4, 4), seed=2)
    ended_well(result, steps=60)
    usual_s, balanced_s = result.reports[8].step_s, result.reports[59].step_s
    slow_s = max(report.step_s for report in result.reports[10:15])
    assert slow_s > 1.4 * usual_s and balanced_s < (usual_s + slow_s) / 2.0
    assert any(" is slow: " in line for line in result.lines)
    assert result.reports[-1].predicted_s > 1.05 * result.reports[0].predicted_s, "plans know of it"


def test_plans_do_not_know_of_slow_devices_where_speeds_shall_not_matter() -> None:
    result = ran(fault(Kind.WORKER_SLOWS, 10), steps=40, workers=(4, 4), elastic={"balance_speeds": False})
    ended_well(result, steps=40)
    assert len({report.predicted_s for report in result.reports}) == 1


def test_a_place_that_loses_its_devices_stays_calm_before_it_is_used_again() -> None:
    """One node of two keeps losing the process on its only device."""
    deaths = [fault(Kind.NEWEST_WORKER_DIES, step) for step in (10, 40, 70)]
    result = ran(*deaths, steps=200, workers=(1, 2), nodes=(1, 1))
    ended_well(result, steps=200)
    losses, growths = of(result, EventKind.RECOVERY), of(result, EventKind.RESIZE)
    assert len(losses) == len(growths) == 3 and all(each.devices == 2 for each in growths)
    waited_s = [grown.at_s - lost.at_s for lost, grown in zip(losses, growths, strict=True)]
    assert waited_s[0] < 15.0 and waited_s[1] < 15.0 and 30.0 <= waited_s[2] < 45.0, waited_s


def test_copies_of_steps_that_are_lost_keep_nothing_safe() -> None:
    """All copies are lost, the run goes back to a checkpoint, and loses a device before there are copies again."""
    for after_s in (2.5, 3.0, 3.5, 4.0, 4.5, 5.0):
        result = ran(
            fault(Kind.CHECKPOINT_DAMAGED, 15),
            fault(Kind.WORKER_DIES, 0, after_s),
            checkpoint={"every_steps": 4, "keep": 3},
            workers=(1, 2),
            nodes=(1, 1, 1),
            push_s=2.0,
            steps=40,
        )
        ended_well(result, steps=40)
        assert all(each.lost_steps <= 2 for each in of(result, EventKind.RECOVERY)[1:]), of(result, EventKind.RECOVERY)


def test_a_copy_that_goes_while_it_is_read_ends_no_run() -> None:
    """Somebody removes it while a recovery reads it; others hold the pieces."""
    for seed in range(30):
        after_s = 0.02 * seed
        result = ran(fault(Kind.WORKER_DIES, 5), fault(Kind.MEMORY_CLEANED, 0, after_s), nodes=(2, 2), seed=seed)
        if any("is held here" in line for line in result.lines):
            ended_well(result)
            return
    raise AssertionError("no schedule is of this kind")


def test_checkpoints_of_every_step_are_whole() -> None:
    """Parts that some devices have written are reported while others still write theirs."""
    result = ran(steps=120, checkpoint={"every_steps": 1, "keep": 200})
    ended_well(result, steps=120)
    assert len(result.checkpoints) > 20


def test_a_finished_step_is_written_down_whenever_the_next_one_breaks() -> None:
    """Also when it breaks before it is dispatched: copies are waited for, which are slow."""
    for number in range(12):
        result = ran(fault(Kind.WORKER_DIES, 10, 0.2 * number), push_s=2.0)
        ended_well(result)


def test_a_planner_that_dies_while_it_starts_is_replaced() -> None:
    for number in range(15):
        result = ran(fault(Kind.PLANNER_DIES, 0, 0.05 + 0.05 * number), steps=3, seed=number)
        ended_well(result, steps=3)
        assert result.num_planned <= 3 + 2


def test_no_store_is_started_where_a_device_that_stood_by_is_dead() -> None:
    """One device makes no rank and stands by; its node dies, then another device does."""
    for seed in range(6):
        result = ran(
            fault(Kind.NODE_DIES, 5),
            fault(Kind.WORKER_DIES, 12),
            fault(Kind.ALL_WORKERS_DIE, 22),
            cluster={"tensor_parallel": 2},
            workers=(2, 5),
            nodes=(4, 1),
            steps=40,
            seed=seed,
        )
        ended_well(result, steps=40)
        assert all(each.lost_steps <= 2 for each in of(result, EventKind.RECOVERY))
        reasons = [each.reason for each in of(result, EventKind.RECOVERY)]
        assert not any("n001, which is dead" in each and "standing by" in each for each in reasons), reasons


def test_a_stop_before_the_first_step_ends_without_a_checkpoint() -> None:
    for number in range(12):
        result = ran(fault(Kind.USER_STOPS, 0, 0.02 + 0.4 * number))
        finished = result.outcome.finished
        assert finished is not None
        assert finished.last_step == len(result.reports) or finished.last_step == 0
        assert (finished.checkpoint is not None) == bool(result.checkpoints)


def test_a_sequence_that_fits_nowhere_is_refused_before_workers_start() -> None:
    """Four devices hold 16 tokens each beside the model's states, the longest sequence has 128."""
    result = ran(cluster={"memory_gib_per_device": 15.2})
    assert result.outcome.wrong_input and "128" in result.outcome.error, result.outcome
    assert not any("starting" in line for line in result.lines)


def test_planners_without_room_are_an_error_that_says_so() -> None:
    result = ran(never_starts=frozenset({Role.PLANNER}))
    assert result.outcome.wrong_input
    assert result.outcome.error.startswith("2 planners (plan.planner_actors) did not all start within 60 s")


def test_a_node_that_leaves_and_cannot_be_replaced_is_saved_before() -> None:
    for seed in range(8, 18):
        result = ran(
            fault(Kind.NODE_DRAINS, 10, lasts_s=8.0),
            workers=(4, 4),
            elastic={"min_workers": 4, "wait_s": 5.0},
            seed=seed,
        )
        if any("is draining and nothing can replace it" in line for line in result.lines):
            assert {10, 11} & {*result.checkpoints}, result.checkpoints
            return
    raise AssertionError("no schedule is of this kind")


def test_what_is_missing_of_newer_states_is_said() -> None:
    """A node's memory is gone before any of its copies has reached another."""
    for seed in range(3):
        result = ran(fault(Kind.MEMORY_LOST, 1), seed=seed, push_s=50.0)
        ended_well(result)
        lines = [line for line in result.lines if "resuming from the beginning" in line]
        assert len(lines) == 1 and "no state in memory is complete: the state after step" in lines[0], lines


def test_three_planners_may_die_one_after_the_other_also_before_the_first_plan() -> None:
    deaths = [fault(Kind.PLANNER_DIES, 0, 4.0) for _ in range(3)]
    result = ran(*deaths, plan_s=30.0, steps=3, plan={"planner_actors": 1})
    ended_well(result, steps=3)
    assert sum("a new one repeats" in line for line in result.lines) == 3


def test_growth_loses_no_step_where_copies_are_rare() -> None:
    """The state that devices leave with is copied, whether or not a copy of it is due."""
    for every in (0, 7):
        elastic = {"snapshot_every_steps": every}
        result = ran(fault(Kind.NODE_COMES, 5), workers=(1, 8), nodes=(2,), steps=40, seed=3, elastic=elastic)
        ended_well(result, steps=40)
        grown = of(result, EventKind.RESIZE)
        assert grown and not any(each.lost_steps for each in grown), grown


def test_planners_may_die_ever_again_with_plans_in_between() -> None:
    result = ran(*[fault(Kind.PLANNER_DIES, step) for step in (5, 10, 15, 20, 25)], plan={"planner_actors": 1})
    ended_well(result)
    assert sum("a new one repeats" in line for line in result.lines) == 5
