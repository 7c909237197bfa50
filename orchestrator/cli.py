"""`headway`: the command line. Errors a person can mend are one clear message and exit code 2, without a traceback."""

from __future__ import annotations

import logging
import sys

USAGE = """\
usage: headway COMMAND [group.key=value ...]

  train   train a model                         headway train [experiment=NAME] run.name=NAME
  eval    evaluate a model on held-out sets     headway eval model.path=runs/NAME/model

Keys and their meaning: docs/config.md. Presets: conf/experiment/.
"""


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        sys.stdout.write(USAGE)
        return 0 if arguments else 2
    command, overrides = arguments[0], arguments[1:]
    if command not in ("train", "eval"):
        sys.stderr.write(f"headway: unknown command {command!r}\n\n{USAGE}")
        return 2
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    from orchestrator.api import evaluate, train
    from orchestrator.config import ConfigError

    try:
        if command == "train":
            train(overrides=overrides)
        else:
            evaluate(overrides=overrides)
    except ConfigError as error:
        sys.stderr.write(f"headway: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("headway: interrupted\n")
        return 130
    except Exception as error:
        # A person reads the message; the traceback is in the log.
        logging.getLogger(__name__).debug("failed", exc_info=True)
        sys.stderr.write(f"headway: {type(error).__name__}: {error}\n")
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
