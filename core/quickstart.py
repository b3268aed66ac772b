"""The command line: `python -m core.quickstart EXPERIMENT --config X.yaml [a.b.c=value ...] [--dry-run] [--help]`, with
EXPERIMENT one of ppo-math (or train), sft and dpo. A file with the key `stages` is several runs, see core/stages.py.

Reads and checks everything, logs what it is going to do, then starts the experiment (core/experiments). Invariant:
until then nothing is written and no process started, and neither torch nor Ray is imported, except that a dry run which
has to tokenise prompts or rows, and an algorithm of the user, import torch; bad input ends with exit code 2 and one
message on stderr.
"""

from __future__ import annotations

from core.processes.signals import NOTHING_STARTED, begin_shutdown, end_at_signals, raise_at_signals

if __name__ == "__main__":
    end_at_signals()  # the imports below take a second or more

import argparse
import errno
import importlib
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from io import TextIOWrapper

from rich.console import Console
from rich.table import Table

from allocation import AllocationRow
from config_schema import nearest_names
from core.checks import header, run_checks
from core.checks.rules import LoadedConfig, config_warnings, load_config
from core.config.experiments import EXPERIMENTS, ExperimentConfig
from core.config.load import taken_config
from core.config.migrate import hint, read, system_of
from core.config.parsing.problems import ConfigError, Problem, host_section, masked_override
from core.config.parsing.yaml_tree import Table as Tree
from core.config.reference import difference_line, first_keys, help_text, ignored_lines, listing, recorded
from core.errors import could_not_write, first_line, is_of_disk, what_user_code_raised
from core.monitoring.logs import DRIVER_LOG, NOTICE, kept_records, log_to_terminal
from core.monitoring.screen import Screen, duration
from core.placement import RAY_ADDRESS, not_joined_note, resolve_allocation
from core.planning.advice import summary_lines
from core.processes.supervise import (
    BAD_INPUT,
    DONE,
    EXIT_CODES,
    FAILED,
    INTERRUPTED,
    Attempt,
    has_working_folder,
    run_attempts,
)
from core.runs.paths import RunningError, RunPaths, begins_anew, private_files, set_aside, sole_run
from core.runs.record import (
    changes_since,
    command_line,
    how_to_continue,
    is_complete,
    newest_model,
    where_the_model_is,
    write_complete,
    write_record,
)
from core.stages import Stage, result_lines, stages_of
from rollout.plugins import refuse_while_importing

logger = logging.getLogger("quickstart")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # an encoding without the lines of tables
    if not has_working_folder():
        return _refuse("the working folder was removed; change to one that exists")
    try:
        return _main(argv)
    except KeyboardInterrupt:
        sys.stderr.write(f"{NOTHING_STARTED}\n")
        return INTERRUPTED
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EPIPE, errno.EIO):
            raise
        with suppress(OSError):  # what is in its buffer fails again when the process ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _refuse(f"cannot write the output: {error.strerror}; send it to a terminal or a file with room")


def _main(argv: Sequence[str] | None) -> int:
    arguments, unknown = _parser().parse_known_intermixed_args(argv)
    if unknown:
        name = unknown[0].removeprefix("--").partition("=")[0].replace("-", "_")
        return _refuse(f"{unknown[0]}: no such option; {hint(name, name) or 'keys are written a.b.c=value'}")
    arguments.config = taken_config(arguments.config, arguments.overrides)
    try:
        refuse_while_importing()
    except RuntimeError as error:
        return _refuse(str(error))
    console = Console(
        soft_wrap=True, highlight=False, markup=False, emoji=False, force_terminal=sys.stdout.isatty()
    )  # not by FORCE_COLOR, which notebooks set: a pipe would get every frame of a spinner
    experiment = "ppo-math" if arguments.experiment == "train" else arguments.experiment
    if arguments.help:
        model, text = EXPERIMENTS.get(experiment), help_text if arguments.verbose else first_keys
        console.print(_parser().format_help() if model is None else text(experiment, model))
        console.print("\nExit codes:\n" + "\n".join(f"  {code:<4} {meaning}" for code, meaning in EXIT_CODES.items()))
        return 0
    if experiment not in EXPERIMENTS:
        return _refuse(_which_experiment(experiment))
    command = None if arguments.dry_run or arguments.preflight else list(map(masked_override, command_line(argv)))
    try:
        may_have_stages = experiment == "ppo-math" and arguments.config is not None
        if may_have_stages and (stages := stages_of(arguments.config, arguments.overrides)):
            return _run_stages(stages, arguments, console, command)
        checked = _check(experiment, arguments.config, arguments.overrides, arguments)
        lacking = _lacking(checked.problems, arguments)
    except ConfigError as error:
        if arguments.config is not None and (other := system_of(read(arguments.config))) is not None:
            way_out = f"slipstream migrate {arguments.config} -o recipe.yaml"
            return _refuse(f"{arguments.config} is a recipe of {other.name}; translate it: {way_out}")
        return _refuse(str(error), count=len(error.problems))
    if command and not checked.loaded.where("trial_name"):
        command.append(f"trial_name={RunPaths.of(checked.loaded.config).trial}")
    return _prepare(checked, lacking, arguments, console, command)


def _run_stages(
    stages: Sequence[Stage], arguments: argparse.Namespace, console: Console, command: list[str] | None
) -> int:
    """Check all stages, then run each that is not complete, from the model of the one before; returns the exit code of
    the last one that ran. `command`: as for _start. Raises ConfigError."""
    problems: list[Problem] = []
    checks: dict[str, Checked] = {}
    for stage in stages:
        try:
            checks[stage.name] = _check(stage.experiment, stage.tree, (), arguments)
            found = checks[stage.name].problems
        except ConfigError as error:
            found = list(error.problems)
        problems += map(stage.named, found)
    lacking = _lacking(list(dict.fromkeys(problems)), arguments)
    ran: list[tuple[Stage, RunPaths]] = []
    began = time.monotonic()
    try:
        code = _run_each(stages, checks, ran, lacking, arguments, console, command)
    except KeyboardInterrupt:
        if len(ran) < 2:
            raise
        sys.stderr.write("Interrupted between two stages; the same command continues.\n")
        return INTERRUPTED
    if code == DONE and command is not None:
        title = f"{len(stages)} stages done in {duration(time.monotonic() - began)}"
        Screen(console, compact=True).box(title, list(result_lines(ran)))
    return code


def _run_each(
    stages: Sequence[Stage],
    checks: Mapping[str, Checked],
    ran: list[tuple[Stage, RunPaths]],
    lacking: Sequence[Problem],
    arguments: argparse.Namespace,
    console: Console,
    command: list[str] | None,
) -> int:
    """Run one stage after the other and add each to `ran`; see _run_stages. `checks`: of stages, by name."""
    environment = dict(os.environ)
    for stage in stages:
        if ran and stage.follows and command is not None:
            if (model := newest_model(ran[-1][1])) is None:
                return _refuse(f"stage {stage.name}: the one before saved no model to begin from")
            stage.begins_from(model)
        is_checked = (not ran or command is None) and stage.name in checks  # a host changes while stages run
        checked = checks[stage.name] if is_checked else _check(stage.experiment, stage.tree, (), arguments)
        loaded, config = checked.loaded, checked.loaded.config
        paths = RunPaths.of(config)
        if command and not ran and not loaded.where("trial_name"):
            command.append(f"trial_name={paths.trial.removesuffix(f'.{stage.name}')}")
        ran.append((stage, paths))
        if command is not None and _is_complete(config, paths) and not changes_since(paths, recorded(config)):
            console.print(f"stage {stage.name} is complete. {where_the_model_is(paths)}")
            continue
        console.print(f"stage {stage.name}, {len(ran)} of {len(stages)}")
        code = _prepare(checked, lacking, arguments, console, command, is_stage=True)
        if code != DONE:
            return code
        lacking = ()  # said once
        os.environ.clear()  # of external_configs.envs of this stage
        os.environ.update(environment)
    return DONE


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A valid configuration, what else is wrong with it on this host, and what the checks logged."""

    experiment: str
    loaded: LoadedConfig
    problems: list[Problem]
    records: list[logging.LogRecord]


def _check(
    experiment: str, source: str | Tree | None, overrides: Sequence[str], arguments: argparse.Namespace
) -> Checked:
    """Read and check a configuration. Raises ConfigError where it breaks its rules."""
    looks_only = arguments.dry_run or arguments.preflight
    loaded = load_config(experiment, source, overrides, weights=not looks_only)
    with kept_records("rollout.data", "core.data", "core.checks") as records:
        problems = run_checks(loaded, connections=looks_only, nodes=arguments.preflight)
    return Checked(experiment=experiment, loaded=loaded, problems=problems, records=records)


def _lacking(problems: list[Problem], arguments: argparse.Namespace) -> list[Problem]:
    """Return the problems that do not fail a dry run: those of this host. Raises ConfigError for others."""
    lacking = [p for p in problems if p.of_host] if arguments.dry_run or arguments.preflight else []
    if problems and (not lacking or arguments.preflight or len(lacking) < len(problems)):
        raise ConfigError(problems, lacking)
    return lacking


def _prepare(
    checked: Checked,
    lacking: Sequence[Problem],
    arguments: argparse.Namespace,
    console: Console,
    command: list[str] | None,
    *,
    is_stage: bool = False,
) -> int:
    """Open the log of a run, alone in its trial, and start it. `command`, `is_stage`: as for _start."""
    loaded, looks_only = checked.loaded, command is None
    paths = RunPaths.of(loaded.config)
    log_file = None if looks_only else paths.logs / DRIVER_LOG
    in_full = arguments.verbose or loaded.config.monitor.style == "areal"
    screen = Screen(console, compact=not in_full)
    aside: RunPaths | None = None
    raise_at_signals()
    with ExitStack() as running:
        try:
            if log_file is not None:
                running.enter_context(private_files(paths))
                running.enter_context(sole_run(paths.logs))
                if begins_anew(loaded.config, paths):
                    aside = set_aside(paths)
            log_to_terminal(
                log_file,
                level=loaded.config.monitor.log_level,
                console=console,
                compact=screen.compact and not looks_only,
            )
        except RunningError as error:
            return _refuse(str(error))
        except OSError as error:
            key = "external_configs.cluster_config.fileroot"
            wrong = f"cannot write {error.filename}: {error.strerror}"
            return _refuse(f"{key}: {wrong}; set it to a folder that you may write")
        for record in checked.records:
            logging.getLogger(record.name).handle(record)
        return _start(
            checked.experiment, loaded, paths, screen, command, aside=aside, lacking=lacking, is_stage=is_stage
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m core.quickstart",
        add_help=False,
        description="Train a language model by asynchronous reinforcement learning (ppo-math), supervised (sft) or on "
        "preferences (dpo).",
        epilog="`python -m core.quickstart ppo-math --help` shows the keys that most runs set.",
    )
    parser.add_argument("experiment", nargs="?", metavar="{" + ",".join(EXPERIMENTS) + "}", help="what to run")
    parser.add_argument("overrides", nargs="*", metavar="a.b.c=value", help="keys to set, over those of the file")
    parser.add_argument("--config", metavar="X.yaml", help="configuration file")
    parser.add_argument(
        "--dry-run",
        "--dry_run",
        action="store_true",
        help="check the recipe and list what this host lacks for it; start nothing",
    )
    parser.add_argument("--preflight", action="store_true", help="a dry run that fails where this host lacks anything")
    parser.add_argument("--verbose", action="store_true", help="show every key, and the log lines as they are written")
    parser.add_argument(
        "--help", "-h", action="store_true", help="the keys that most runs set; with --verbose, all keys"
    )
    return parser


def _which_experiment(given: str | None) -> str:
    if given is None:
        return f"which experiment? One of {', '.join(EXPERIMENTS)}; --help explains"
    if given.endswith((".yaml", ".yml")):
        return f"which experiment? Write one of {', '.join(EXPERIMENTS)} before {given}"
    near = [name for name in EXPERIMENTS if name.startswith(given)]
    near += nearest_names(given, EXPERIMENTS, cutoff=0.4)
    return f"unknown experiment {given!r}; " + (
        f"did you mean {near[0]!r}?" if near else f"one of {', '.join(EXPERIMENTS)}"
    )


def _refuse(message: str, *, count: int = 1) -> int:
    head = "error: " if count == 1 else f"error: {count} problems\n"
    sys.stderr.write(f"{head}{message}\n")
    return BAD_INPUT


def _start(
    experiment: str,
    loaded: LoadedConfig,
    paths: RunPaths,
    screen: Screen,
    command: Sequence[str] | None,
    *,
    aside: RunPaths | None,
    lacking: Sequence[Problem],
    is_stage: bool,
) -> int:
    """Log what will run, then run it. `command`: the words that start it again; None: a dry run. `aside`: the folders
    that an earlier run of the trial has now. `lacking`: what this host does not have for the run. `is_stage`: other
    runs of this command may follow."""
    config = loaded.config
    if screen.compact:
        screen.print(*header(loaded, paths))
    else:
        screen.console.print(listing(config))
    logger.info("Running %s experiment.", experiment)
    if loaded.ignored:
        logger.warning(ignored_lines(loaded.ignored))
    if difference := difference_line(config, loaded.ignored):
        logger.warning(difference)
    for warning in config_warnings(config, loaded.translated.spelled):
        logger.warning(warning)
    logger.info("Logs will be dumped to %s", paths.logs)
    logger.info("Model checkpoints will be saved to %s", paths.checkpoints)
    if command is None and begins_anew(config, paths):
        logger.info("An earlier run of this trial is there; a start gives it a dated trial name and begins anew.")
    if aside is not None:
        logger.warning(
            "An earlier run of this trial is there; it is trial_name=%s from now on, with logs in %s. This run begins "
            "anew (%s).", aside.logs.name, aside.logs, config.recover_setting,
        )  # fmt: skip
    if command is None or not screen.compact:
        screen.console.print(allocation_table(config))
    for line in device_lines(config):
        logger.info(line)
    if note := not_joined_note(config):
        logger.info(note)
    changes = changes_since(paths, recorded(config))
    complete = _is_complete(config, paths)
    if complete:
        logger.info(_how_to_train_on(config, paths), extra=NOTICE)
    if command is None:
        for line in summary_lines(config):
            logger.info(line)
        if lacking:
            logger.warning(host_section(lacking))
        logger.info("Dry run: every check%s passed; nothing was started.", " of the recipe" if lacking else "")
        return 0
    if complete and changes:
        logger.error("These changes have no effect on a trial that is complete: %s.", "; ".join(changes))
        return BAD_INPUT
    if complete:
        return DONE
    try:
        write_record(config.NAME, recorded(config), paths, command)
    except OSError as error:
        logger.error("%s", could_not_write("the configuration", paths.logs, error))
        return FAILED
    if changes:
        logger.warning("Changed since the last start of this trial: %s.", "; ".join(changes))
    logger.info("Launching experiments with %s...", config.launcher)
    if config.is_local:
        os.environ.pop(RAY_ADDRESS, None)
    os.environ.update(config.external_configs.environment())
    return run_attempts(
        lambda attempt: _attempt(config, paths, screen, attempt, command, is_stage=is_stage),
        retries=config.retries,
        driver_seconds=config.deadlines.driver_seconds,
        end_seconds=config.deadlines.end_seconds,
        log_folder=paths.logs,
        more_follow=is_stage,
        interrupted=lambda attempt: _interrupted(config, paths, attempt, command),
    )


def _attempt(
    config: ExperimentConfig,
    paths: RunPaths,
    screen: Screen,
    attempt: Attempt,
    command: Sequence[str],
    *,
    is_stage: bool = False,
) -> int:
    """Run one attempt and return the exit code. Unless it is final, another attempt may follow."""
    try:
        try:
            _run(config, paths, screen, attempt)
        finally:
            screen.close()
        begin_shutdown()  # a signal changes nothing from here on
        write_complete(paths, config.exp_ctrl.length_keys)
        logger.info("Training is complete. %s", where_the_model_is(paths))
        if not is_stage:  # whose results are shown with those of all
            screen.finish(model=newest_model(paths), logs=paths.logs, experiment=config.NAME)
        return DONE
    except KeyboardInterrupt:
        return _interrupted(config, paths, attempt, command)
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        # What a user can act on: the message is enough. The log file has the traceback, of a worker's too.
        raised = what_user_code_raised(error, paths.logs / DRIVER_LOG)
        logger.error("%s", raised or str(error) or type(error).__name__, exc_info=error)
        attempt.report(final=isinstance(error, ValueError) or is_of_disk(error), cause=first_line(error))
        return FAILED
    except BaseException as error:
        attempt.report(final=True, cause=f"{type(error).__name__}: {first_line(error)}")
        if isinstance(error, Exception) and (raised := what_user_code_raised(error, paths.logs / DRIVER_LOG)):
            logger.error("%s", raised, exc_info=error)
            return FAILED
        raise


def _is_complete(config: ExperimentConfig, paths: RunPaths) -> bool:
    exactly = config.continues_exactly or not config.recovers  # other data: other steps
    continues = exactly and not begins_anew(config, paths)
    return continues and is_complete(paths, config.exp_ctrl.length_keys)


def _how_to_train_on(config: ExperimentConfig, paths: RunPaths) -> str:
    given = [f"exp_ctrl.{key}={value}" for key, value in config.exp_ctrl.length_keys.items() if value is not None]
    return (
        f"Training is complete already: to train on, raise {' and '.join(given)}; to train anew, choose another "
        f"trial_name or write recover_mode=disabled. {where_the_model_is(paths)}"
    )


def _interrupted(config: ExperimentConfig, paths: RunPaths, attempt: Attempt, command: Sequence[str]) -> int:
    logger.error("Interrupted. %s", how_to_continue(config, paths, command))
    attempt.report(final=True, cause="interrupted")
    return INTERRUPTED


def _run(config: ExperimentConfig, paths: RunPaths, screen: Screen, attempt: Attempt) -> None:
    # Not before the checks have passed: these modules import torch and Ray, which takes seconds.
    screen.begin("importing torch and Ray")
    module, _, function = config.RUN.partition(":")
    getattr(importlib.import_module(module), function)(config, paths, screen, attempt)


def allocation_table(config: ExperimentConfig) -> Table:
    """Return the roles of the run, each with its layout and place."""
    allocation = resolve_allocation(config)
    table = Table(title=f"Allocation: {allocation}", title_justify="left")
    columns = [name for name in AllocationRow._fields if name != "why"]  # too long for a column: see device_lines
    for name in columns:
        table.add_column(name.replace("_", " "), no_wrap=name in ("role", "backend", "layout"))
    for row in allocation.table():
        if row.role in config.placed_roles:
            table.add_row(*(str(getattr(row, name)) for name in columns))
    return table


def device_lines(config: ExperimentConfig) -> list[str]:
    """Return backend and device of the roles of the run with the reason, one line for those that share it."""
    alike: dict[str, list[str]] = {}
    for row in resolve_allocation(config).table():
        if row.role in config.placed_roles:
            alike.setdefault(f"{row.backend} on {row.device} ({row.why})", []).append(row.role)
    return [f"{', '.join(roles)}: {what}" for what, roles in alike.items()]


if __name__ == "__main__":
    sys.exit(main())
