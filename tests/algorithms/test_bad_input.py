"""Errors about arguments name the argument, what was given and what is required."""

import math
import re
import warnings

import jax.numpy as jnp
import optax
import pytest

import jdaso

ALONE = jdaso.single_exchange()
FOUR = jdaso.axis_exchange("node", 4)
RARE = jdaso.constant(4, 1)
TWO_LEAVES = [jnp.ones(2), jnp.ones(3), jnp.int32(1)]


def dasgd(**arguments):
    return jdaso.dasgd(ALONE, **{"period": 4, "delay": 2} | arguments)


def daso(**arguments):
    return jdaso.daso(ALONE, **{"period": 4, "delay": 2} | arguments)


def easgd(**arguments):
    return jdaso.easgd(ALONE, **{"period": 4} | arguments)


def eamsgd(**arguments):
    return jdaso.eamsgd(ALONE, **{"period": 4, "learning_rate": 0.1, "momentum": 0.9} | arguments)


def diloco(**arguments):
    return jdaso.diloco(ALONE, **{"period": 4} | arguments)


def local_sgd(**arguments):
    return jdaso.local_sgd(ALONE, **{"period": 4} | arguments)


def allreduce_gradients(**arguments):
    return jdaso.allreduce_gradients(ALONE, **arguments)


PERIODIC = [daso, dasgd, easgd, eamsgd, diloco, local_sgd]
TABLE = [
    (dasgd, {"xi": 1.5}, "xi must be in [0, 1], got 1.5"),
    (dasgd, {"xi": -0.1}, "xi must be in [0, 1], got -0.1"),
    (dasgd, {"xi": math.nan}, "xi must be in [0, 1], got nan"),
    (dasgd, {"delay": 5}, "delay must not exceed period, got delay=5 and period=4"),
    (dasgd, {"delay": -1}, "delay must be an integer >= 0, got -1"),
    (dasgd, {"delay": None}, "dasgd(period=4) requires a delay in steps"),
    (dasgd, {"period": None, "schedule": RARE}, "dasgd requires either a period or a schedule"),
    (dasgd, {"period": None, "schedule": RARE, "delay": None, "xi": "half"}, "xi must be a number"),
    (dasgd, {"xi": None}, "xi must be a number, got None"),
    (dasgd, {"xi": True}, "xi must be a number, got True"),
    (dasgd, {"xi": jnp.float32(1.5)}, "xi must be in [0, 1], got"),
    (dasgd, {"fragments": 5}, "fragments must be an integer in [1, 4], got 5"),
    (dasgd, {"fragments": 0}, "fragments must be an integer in [1, 4], got 0"),
    (dasgd, {"fragments": 2.0}, "fragments must be an integer in [1, 4], got 2.0"),
    (dasgd, {"fragments": True}, "fragments must be an integer in [1, 4], got True"),
    (dasgd, {"fragments": None}, "fragments must be an integer in [1, 4], got None"),
    (diloco, {"mix": 1}, "mix must be in [0, 1), got 1"),
    (diloco, {"mix": 1.5}, "mix must be in [0, 1), got 1.5"),
    (diloco, {"mix": -0.1}, "mix must be in [0, 1), got -0.1"),
    (diloco, {"delay": 5, "mix": 0.5}, "delay must not exceed period, got delay=5 and period=4"),
    (diloco, {"mix": "half"}, "mix must be a number, got 'half'"),
    (diloco, {"warmup": -1}, "warmup must be an integer >= 0, got -1"),
    (diloco, {"fragments": 5}, "fragments must be an integer in [1, 4], got 5"),
    (diloco, {"fragments": 2.5}, "fragments must be an integer in [1, 4], got 2.5"),
    (
        diloco,
        {"period": None, "delay": 1, "schedule": RARE},
        "diloco requires either a period or a schedule, which has a delay of its own; got "
        "period=None, delay=1 and a schedule",
    ),
    (diloco, {"outer": 0.7}, "outer must be an optax optimizer, such as optax.sgd(1.0), got 0.7"),
    (diloco, {"outer": optax.sgd}, "outer must be an optax optimizer"),
    (local_sgd, {"merge": "sum"}, "merge must be one of mean, delta, got 'sum'"),
    (local_sgd, {"delay": 5, "merge": "delta"}, "delay must not exceed period, got delay=5"),
    (local_sgd, {"period": None, "schedule": 4}, "local_sgd: schedule must be a jdaso.Schedule"),
    (easgd, {"alpha": 0}, "alpha must be positive and finite, got 0"),
    (easgd, {"alpha": -0.1}, "alpha must be positive and finite, got -0.1"),
    (easgd, {"alpha": math.inf}, "alpha must be positive and finite, got inf"),
    (easgd, {"beta": 0}, "beta must be positive and finite, got 0"),
    (easgd, {"beta": -0.9}, "beta must be positive and finite, got -0.9"),
    (easgd, {"alpha": "small"}, "alpha must be a number, got 'small'"),
    (easgd, {"beta": None}, "beta must be a number, got None"),
    (eamsgd, {"alpha": 0}, "alpha must be positive and finite, got 0"),
    (eamsgd, {"beta": 0}, "beta must be positive and finite, got 0"),
    (eamsgd, {"learning_rate": None}, "eamsgd requires a learning_rate, a number or"),
    (eamsgd, {"momentum": None}, "eamsgd requires a momentum in [0, 1)"),
    (eamsgd, {"momentum": "much"}, "momentum must be a number, got 'much'"),
    (eamsgd, {"momentum": 1.0}, "momentum must be in [0, 1), got 1.0"),
    (eamsgd, {"momentum": -0.1}, "momentum must be in [0, 1), got -0.1"),
    *((f, {"period": 2**31}, "period must be below 2**31, got 2147483648") for f in PERIODIC),
    *((f, {"period": 0}, "period must be an integer >= 1, got 0") for f in PERIODIC),
    *((f, {"period": 2.5}, "period must be an integer >= 1") for f in PERIODIC),
    *((f, {"period": None}, f"{f.__name__} requires either a period or a sch") for f in PERIODIC),
    *((f, {"schedule": RARE}, f"{f.__name__} requires either a period or a sch") for f in PERIODIC),
    *((f, {"period": RARE}, f"{f.__name__} requires the schedule as a keyword") for f in PERIODIC),
    *(
        (f, {"wire": "float8"}, "wire must be one of float64, float32, bfloat16, float16")
        for f in [*PERIODIC, allreduce_gradients]
    ),
    *(
        (f, {"nonfinite": "ignore"}, "nonfinite must be one of skip, raise, off, got 'ignore'")
        for f in [*PERIODIC, allreduce_gradients]
    ),
]


@pytest.mark.parametrize(
    ("factory", "bad", "message"),
    TABLE,
    ids=[f"{factory.__name__}-{message}" for factory, _, message in TABLE],
)
def test_a_factory_names_what_does_not_fit(factory, bad, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        factory(**bad)


def test_an_exchange_of_the_wrong_type_is_refused():
    topology = jdaso.discover_topology()
    with pytest.raises(ValueError, match=r"exchange must be a jdaso\.Exchange, .* got Topology"):
        jdaso.daso(topology, schedule=RARE)


@pytest.mark.parametrize("factory", [dasgd, diloco])
def test_more_fragments_than_leaves_are_refused(factory):
    averaging = factory(fragments=3)
    with pytest.raises(ValueError, match=r"fragments must be at most 2, .*leaves, got 3"):
        averaging.init(TWO_LEAVES)


@pytest.mark.parametrize("factory", [*PERIODIC, allreduce_gradients])
def test_parameters_without_a_number_to_average_are_refused(factory):
    with pytest.raises(
        ValueError, match=f"{factory.__name__}: params must have at least one floating-point"
    ):
        factory().init({"n": jnp.int32(1)})


@pytest.mark.parametrize("factory", PERIODIC)
def test_an_update_without_parameters_is_refused(factory):
    averaging = factory()
    with pytest.raises(ValueError, match=rf"{factory.__name__} moves parameters: call update\("):
        averaging.update(jnp.ones(2), averaging.init(jnp.ones(2)))


def test_a_state_without_a_center_is_refused():
    with pytest.raises(
        ValueError, match=r"no center: pass the state of jdaso.easgd or jdaso.eamsgd"
    ):
        jdaso.easgd_center(dasgd().init(jnp.ones(2)))
    with pytest.raises(ValueError, match="holds 0 states of the type AveragingState"):
        jdaso.easgd_center(optax.sgd(0.1).init(jnp.ones(2)))
    with pytest.raises(ValueError, match="holds 0 states of the type EamsgdState"):
        jdaso.eamsgd_eval_params(easgd().init(jnp.ones(2)), jnp.ones(2))


PARAMS = {"w": jnp.ones(2)}
CHAIN = jdaso.chain(optax.sgd(0.1), dasgd())
SWAPPED = "params and opt_state have been swapped: pass opt_state, params"
FIRST = "jdaso.chain takes the optimizer first and the averaging second"
STATE = "opt_state must be the state that tx.init or apply_gradients returned, got"
CALLS = [
    (lambda: jdaso.drain(CHAIN, PARAMS, CHAIN.init(PARAMS)), SWAPPED),
    (lambda: jdaso.diloco_anchor(PARAMS, diloco().init(PARAMS)), SWAPPED),
    (lambda: jdaso.eamsgd_eval_params(PARAMS, eamsgd().init(PARAMS)), SWAPPED),
    (lambda: jdaso.diloco_anchor(PARAMS, PARAMS), "opt_state holds 0 states of the type"),
    (lambda: jdaso.apply_gradients(CHAIN, PARAMS, PARAMS, CHAIN.init(PARAMS)), f"{STATE} an ob"),
    (lambda: jdaso.apply_gradients(CHAIN, PARAMS, dasgd().init(PARAMS), PARAMS), f"{STATE} an obj"),
    (lambda: jdaso.apply_gradients(PARAMS, CHAIN, CHAIN.init(PARAMS), PARAMS), "tx must be what"),
    (lambda: jdaso.chain(dasgd(), optax.sgd(0.1)), f"{FIRST}, as in"),
    (lambda: jdaso.chain(0.1, dasgd()), f"{FIRST}, as in"),
    (lambda: jdaso.chain(optax.sgd, dasgd()), f"{FIRST}, as in"),
    (lambda: jdaso.mpi_exchange("float32"), "topology must be what jdaso.discover_topology()"),
    (lambda: jdaso.mpi_exchange(ALONE), "got an object of type"),
]


@pytest.mark.parametrize(("call", "message"), CALLS)
def test_arguments_in_the_wrong_order_or_of_another_type_are_named(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


BIG = 2**31
SIZES = {"period": 4, "warmup": 1, "cooldown": 1, "total": 100, "epoch": 10, "delay": 1}
TOO_BIG = [
    *(
        (name, lambda name=name: jdaso.cycling(**SIZES | {"patience": 2} | {name: BIG}))
        for name in [*SIZES, "patience"]
    ),
    ("period", lambda: jdaso.schedules.linear((1, 0), (BIG, 0), 10)),
    ("delay", lambda: jdaso.schedules.linear((1, BIG), (1, 0), 10)),
    ("steps", lambda: jdaso.schedules.linear((1, 0), (2, 0), BIG)),
    ("numbers", lambda: jdaso.schedules.by_step(lambda step: (BIG, 0))),
    ("numbers", lambda: jdaso.schedules.by_step(lambda step: (4, BIG))),
    ("warmup", lambda: diloco(warmup=BIG)),
]


@pytest.mark.parametrize(("name", "schedule"), TOO_BIG)
def test_a_number_that_does_not_fit_int32_is_named(name, schedule):
    with pytest.raises(ValueError, match=rf"{name} (must be )?below 2\*\*31"):
        schedule()


@pytest.mark.parametrize(
    ("unstable", "advice"),
    [
        (lambda: jdaso.easgd(FOUR, period=8, beta=1.6), "beta / P = 0.4 .* Choose beta below 1.6"),
        (lambda: jdaso.easgd(FOUR, period=8, alpha=0.4), "alpha = 0.4 .* Choose alpha below 0.4"),
        (
            lambda: jdaso.easgd(jdaso.single_exchange(), period=8, beta=1.0),
            "beta / P = 1 .* Choose beta below 1",
        ),
        (
            lambda: jdaso.eamsgd(FOUR, schedule=RARE, learning_rate=0.1, momentum=0.9, beta=1.6),
            "beta / P = 0.4 .* Choose beta below 1.6",
        ),
    ],
)
def test_a_rate_that_diverges_for_every_learning_rate_is_warned_of(unstable, advice):
    """Condition 17 where eta h -> 0: alpha < 2 / (P + 1), and so beta < 2 P / (P + 1)."""
    message = rf"{advice}\.$"
    with pytest.warns(UserWarning, match=message) as caught:
        unstable()
    assert [warning.filename for warning in caught] == [__file__]  # points to the caller


def test_a_rate_that_can_be_stable_is_not_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jdaso.easgd(FOUR, period=1, beta=1.59)
        for nodes in (1, 2, 1000):
            jdaso.easgd(jdaso.axis_exchange("node", nodes), period=8)
