"""examples/language_model.py with SIGNAL and PAUSE of training.py; takes its options."""

import sys

import training  # isort: skip  # so that examples/ can be imported

import config
import language_model

if __name__ == "__main__":
    sys.exit(training.main(config.parse(defaults=language_model.DEFAULTS), language_model.task))
