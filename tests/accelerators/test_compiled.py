"""What XLA makes of a training step for an H100 and a TPU v5e. It compiles, and runs nothing.

Sizes are in copies of the parameters, 16 MB in 40 leaves on each node.
"""

import optax
import pytest
from deviceless import Case, compile_case, compile_resnet, reason_to_skip

ADAMW = optax.adamw(1e-3)
SLOW = pytest.mark.slow


def compiled(case):
    if reason := reason_to_skip(case.platform):
        pytest.skip(reason)
    return compile_case(case)


def check(case, temporary, waits=1):
    """Compiles a step and asserts what holds of all of them."""
    found = compiled(case)
    assert found.temporary <= temporary
    assert found.waits == waits, "the host waits for the device where XLA reads a condition"
    assert found.count("all-gather") == 0
    assert found.captured == 0, "a custom call in a command buffer runs once, when it is captured"
    assert found.calls > 0 or case.layout == "axis"
    host = ("infeed", "outfeed", "send", "recv", "send-done", "recv-done")
    assert not any(found.count(name) for name in host)
    return found


def test_a_step_of_daso_takes_a_part_of_the_parameters_and_one_wait():
    found = check(Case("daso"), 0.1)
    assert found.copies_at_each_step <= 10


@SLOW
@pytest.mark.parametrize("region_analysis", [False, True])
@pytest.mark.parametrize(
    ("name", "temporary"),
    [
        ("daso, guard off", 0.1),
        ("daso, 4 fragments", 0.1),
        ("dasgd", 0.1),
        ("easgd", 0.1),
        ("diloco", 0.35),
        ("daso, bfloat16", 0.51),
    ],
)
def test_nothing_due_copies_no_parameters(name, temporary, region_analysis):
    found = check(Case(name, region_analysis=region_analysis), temporary)
    assert found.copies_at_each_step <= 10


@SLOW
@pytest.mark.parametrize("name", ["daso, int8", "daso, float4"])
def test_error_feedback_takes_two_copies_at_most(name):
    check(Case(name), 2.05)


@SLOW
@pytest.mark.parametrize(("name", "temporary"), [("daso", 0.1), ("diloco", 0.35)])
def test_adam_is_updated_in_place(name, temporary):
    found = check(Case(name, optimizer=ADAMW), temporary)
    assert found.copies_at_each_step <= 10


@SLOW
@pytest.mark.parametrize("layout", ["replicated", "sharded", "shard_map"])
def test_two_gpus_copy_and_gather_nothing(layout):
    found = check(Case("daso", devices=2, layout=layout), 0.1)
    assert found.copies_at_each_step <= 10


@SLOW
def test_host_callbacks_take_one_copy():
    found = compiled(Case("daso", native=False))
    assert found.temporary <= 1.05
    assert found.waits == 1


@SLOW
@pytest.mark.parametrize("name", ["daso", "diloco"])
def test_an_axis_exchange_between_four_gpus_takes_two_copies_at_most(name):
    check(Case(name, devices=4, layout="axis", optimizer=ADAMW), 2.05)


@SLOW
def test_resnet_50_copies_hardly_more_than_without_an_exchange():
    if reason := reason_to_skip("cuda"):
        pytest.skip(reason)
    alone, daso = (compile_resnet(name).count("copy") for name in ("none", "daso"))
    assert daso <= alone + 10


@SLOW
@pytest.mark.parametrize("name", ["daso", "diloco"])
def test_an_axis_exchange_between_four_tpus_takes_less_than_a_copy(name):
    found = compiled(Case(name, "tpu", 4, "axis", optimizer=ADAMW))
    assert found.temporary <= 0.6
    assert found.count("all-gather") == 0


@SLOW
@pytest.mark.parametrize("layout", ["replicated", "sharded", "shard_map"])
def test_host_callbacks_of_four_tpus_gather_nothing(layout):
    found = compiled(Case("daso", "tpu", 4, layout))
    assert found.temporary <= 2.1
    assert found.count("all-gather") == 0
    assert found.count("send") > 0
