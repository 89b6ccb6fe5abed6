"""python -m pytest examples/strategy_plugin, with the package installed."""

from anyqlora.testing import StrategyContract


class TestLocalSgd(StrategyContract):
    strategy = "local-sgd"
    options = {"every": 2}
    sums_every_step = False
