"""Evaluate a model on benchmarks, or compare two evaluations.

    python -m tools.eval --model_path M --output_path O --data_names math_500,aime24,amc23 --max_gen_tokens 32768
    python -m tools.eval compare A B

M is a Hugging Face folder, a saved step of a run, or a recover checkpoint. O gets one jsonl row per answer while it
runs; started again it continues where it stopped, and writes the table as text, JSON, markdown and a bar chart.
"""

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from tools import arguments
from tools.eval.compare import compare, report

FAILED = 1
_FIELDS = {
    "prompt_field": "the question", "answer_field": "the answer", "messages_field": "the conversation",
    "choices_field": "the options of multiple choice",
}  # fmt: skip
_BAD_PATHS = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate or compare; return 0: done; 1: failed while running; 2: bad input, the reason on stderr both times; 130:
    interrupted."""
    argv = list(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    try:
        if argv[:1] == ["compare"]:
            given = _compare_parser().parse_args(argv[1:])
            print(report(compare(given.A, given.B, allow_different=given.allow_different)))
            return 0
        return _evaluate(_parser().parse_args(argv))
    except (ValueError, *_BAD_PATHS) as error:  # CompareError, EvalError and DatasetError are ValueErrors
        return arguments.refused(error)
    except OSError as error:
        return arguments.refused(error, code=FAILED)
    except KeyboardInterrupt:
        without = ", without --overwrite," if "--overwrite" in argv else ""
        print(f"Interrupted; run the same command{without} to resume.", file=sys.stderr)
        return 130


def _evaluate(given: argparse.Namespace) -> int:
    from tools.eval.settings import settings_from

    settings = settings_from(given)
    from tools.eval.run import FAILURES, evaluate

    try:
        print(asyncio.run(evaluate(settings)))
    except FAILURES as error:
        return arguments.refused(error, code=FAILED)
    print(f"Answers, results.json, results.md and results.png are in {given.output_path}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = arguments.parser_of("tools.eval", __doc__)
    add = parser.add_argument
    add(
        "--model_path",
        type=arguments.model(),
        required=True,
        help="folder of a run (its newest model), Hugging Face folder, saved step, recover checkpoint (of several "
        "engines its actor), engine in one, or id of a model of the Hugging Face hub",
    )
    add("--output_path", type=arguments.new_folder, required=True, help="folder for completions and tables")
    add("--data_names", default="math_500,aime24,amc23", help="names, paths or Hugging Face ids, with commas")
    add("--max_gen_tokens", type=_positive, help="maximum tokens per completion; default: that of the run, or 32768")
    add("--n_sampling", type=int, default=32, help="sampled completions per question, in addition to the greedy one")
    add("--temperature", type=float, default=0.6, help="of the sampled completions")
    add("--top_p", type=float, default=0.95, help="of the sampled completions")
    add("--seed", type=arguments.seed, default=1)
    add("--num_questions", type=_positive, help="use only the first N questions of each benchmark")
    add("--data_dir", type=Path, help="folder of the benchmarks; default: $SLIPSTREAM_DATA, data")
    add("--split", help="split of folders and Hugging Face data sets; default: test, validation or the only one")
    add("--subset", help="subset (configuration) of folders and Hugging Face data sets")
    for field, what in _FIELDS.items():
        add(f"--{field}", help=f"column of {what}; default: detected")
    add(
        "--prompt_template",
        help="template that contains {prompt}; default: the chat template with an instruction to box the "
        "answer if the tokenizer has one, else the question alone",
    )
    add("--system", help="system message of the chat template")
    add("--instruction", help="text after a question in the chat template")
    add("--workflow", help="workflow.type; default: that of the run that saved the model, or math")
    add("--reward", help="reward.function; default: that of the run that saved the model, or math")
    add(
        "--right_at",
        type=float,
        help="reward from which a completion is right; default: reward.right_at of the run, 1 for math, and no "
        "accuracy for another reward",
    )
    add("--config", type=Path, help="configuration of the run; default: {fileroot}/logs/{trial}/config.yaml")
    add("--ignore_run", action="store_true", help="do not use the configuration of the run that saved the model")
    add("--generator", choices=("auto", "sglang", "embedded"), default="auto", help="auto: sglang if there is a GPU")
    add("--tensor_parallel", type=_positive, default=1, help="GPUs of one SGLang server")
    add("--max_running", type=_positive, default=256, help="maximum concurrent requests per generator")
    add("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on SGLang, float32 embedded")
    add("--sglang_python", type=Path, help="Python interpreter with SGLang, if this one has none")
    add(
        "--sglang",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a server argument by name, such as mem_fraction_static=0.8; can be repeated",
    )
    add("--reward_workers", type=_positive, default=2, help="processes that judge answers")
    add("--overwrite", action="store_true", help="delete the evaluation in --output_path and start again")
    return parser


def _compare_parser() -> argparse.ArgumentParser:
    parser = arguments.parser_of(
        "tools.eval compare",
        "Two evaluations side by side: differences with 95 % bootstrap intervals, and what flipped.",
    )
    parser.add_argument("A", type=Path, help="--output_path of the first")
    parser.add_argument("B", type=Path, help="of the second")
    parser.add_argument(
        "--allow_different",
        action="store_true",
        help="also compare evaluations with other rewards, workflows, prompt formats or sampling settings, and print "
        "the differences",
    )
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
