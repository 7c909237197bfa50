"""`headway`: the command line. What goes wrong is one clear message on stderr.

Exit codes: 0 done; 1 the run failed, its traceback is in the log file that the message names, or what was checked is not
as it should be; 2 the configuration or the data can't be used; 130 interrupted. An error before there is a log file that is
none of these keeps its traceback: it comes from the user's own code, or is a bug.
"""

from __future__ import annotations

import logging
import sys

USAGE = """\
usage: headway COMMAND [group.key=value ...]

  train                 train a model                         headway train [experiment=NAME] run.name=NAME
  eval                  evaluate a model on held-out sets     headway eval model.path=runs/NAME/model
  profile-difficulty    measure the prompts' pass rates       headway profile-difficulty [experiment=NAME] profile.out=FOLDER
                        and copy those worth training on
  check-rewards         what the rewards pay for answers      headway check-rewards [experiment=NAME] [check_rewards.rows=50]
                        known to be right or wrong
  doctor                try every part of a run before it:    headway doctor [experiment=NAME] [run.name=NAME]
                        engines, rewards, learner, weights
  replay                compute a step of a run once more     headway replay replay.run=runs/NAME [replay.version=3]
                        from its journal
  simulate              what a run would be like, without     headway simulate [simulate.advise=true] [--multirun] staleness.max=2
                        its GPUs

Keys and their meaning: docs/config.md. Presets: conf/experiment/.
"""


COMMANDS = ("train", "eval", "profile-difficulty", "check-rewards", "doctor", "replay", "simulate")


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        sys.stdout.write(USAGE)
        return 0 if arguments else 2
    command, overrides = arguments[0], arguments[1:]
    if command in COMMANDS and any(override in ("-h", "--help") for override in overrides):
        sys.stdout.write(USAGE)
        return 0
    if command not in COMMANDS:
        sys.stderr.write(f"headway: unknown command {command!r}\n\n{USAGE}")
        return 2
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    from orchestrator.config import ConfigError

    try:
        return _carry_out(command, overrides)
    except ConfigError as error:
        sys.stderr.write(f"headway: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("headway: interrupted\n")
        return 130
    except Exception as error:
        from orchestrator.api import traceback_file

        if (log := traceback_file(error)) is None:
            raise
        cause = getattr(error, "cause", None) or error  # Ray's errors hold the whole remote traceback in their text
        sys.stderr.write(f"headway: {type(cause).__name__}: {cause}\nThe traceback is in {log}\n")
        return 1


def _carry_out(command: str, overrides: list[str]) -> int:
    """The exit code of what came to its end."""
    if command == "simulate":  # which needs nothing of what a run does
        from orchestrator.simulation.command import simulate_command

        simulate_command(overrides)
        return 0
    from orchestrator.api import check_rewards, doctor, evaluate, profile_difficulty, replay, train

    if command == "train":
        train(overrides=overrides)
    elif command == "eval":
        evaluate(overrides=overrides)
    elif command == "check-rewards":
        return int(not check_rewards(overrides=overrides).clean)
    elif command == "doctor":
        return int(not all(check.passed for check in doctor(overrides=overrides)))
    elif command == "replay":
        return int(bool(replay(overrides=overrides).differing))
    else:
        profile_difficulty(overrides=overrides)
    return 0


if __name__ == "__main__":
    sys.exit(main())
