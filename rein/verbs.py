"""The command line's verbs in words: what each does, an example, the options that take a value."""

STAGES = {
    "sft": "fine-tune on prompt + response or chat messages",
    "reward": "train a reward model from preference pairs",
    "rollout": "stored prompts -> trajectories with token ids and log-probs",
    "score": "score trajectories: rules, a reward model, your function",
    "train": "offline PPO: scored trajectories -> a better actor",
    "evaluate": "accuracy before and after on fresh prompts, with interval",
    "export": "the result as a Hugging Face folder, where the gate lets it pass",
    "report": "one HTML page: curves, before and after, samples",
}
COMMANDS = {
    "run": "the recipe's stages in order, skipping what is done",
    "demo": "from nothing to a better model, here, in minutes",
    "check": "print the plan and a memory estimate, loading no weights",
    "convert": "files of verl, TRL, OpenRLHF, LLaMA-Factory, OpenAI, vLLM -> Rein's",
    "cache": "what frozen models said, kept for all runs: list it (ls), make room (prune)",
    "audit": "what data files hold and what is wrong with them, on one page",
    "deploy": "an exported model as the current version of a folder; back again; the list",
    "ui": "local pages over all runs in a folder, live: curves, guards, rows token by token",
}
EXAMPLES = {
    "sft": "rein sft recipe.yaml sft.optim.lr=1e-5",
    "reward": "rein reward recipe.yaml reward.files=pairs.parquet",
    "rollout": "rein rollout recipe.yaml rollout.n=8 rollout.temperature=0.7",
    "score": "rein score recipe.yaml score.reward=my_pkg.rewards:politeness",
    "train": "rein train recipe.yaml data.train_batch_size=256 actor.optim.lr=1e-6 out=runs/first",
    "evaluate": "rein evaluate recipe.yaml evaluate.files=test.parquet",
    "export": "rein export recipe.yaml export.to=models/better",
    "report": "rein report recipe.yaml",
    "run": "rein run recipe.yaml seed=1 out=runs/seed1",
    "demo": "rein demo reward=noisy seed=1",
    "check": "rein check recipe.yaml --try",
    "convert": "rein convert rollouts/*.jsonl trajectories.parquet --from verl",
    "cache": "rein cache prune recipe.yaml --older-than 30 --dry-run",
    "audit": "rein audit trajectories.parquet --model MODEL --against test.parquet out=runs/first",
    "deploy": "rein deploy runs/first/export/model --to /srv/model",
    "ui": "rein ui runs --port 0",
}
EPILOG = """\
RECIPE is a YAML file or the name of a packaged one (demo); key=value overrides it, and alone makes a recipe.
exit codes: 0 done, 2 usage or recipe, 3 data, 4 stopped or paused by a guard, 5 gate failed,
6 snapshot or disk, 7 engine or rank, 8 your function raised, 9 out of memory, 130/143 interrupted (saved)
"""
ACTIONS = ("ls", "prune")  # of cache
OPTIONS: dict[str, dict[str, tuple[str, str]]] = {  # of a verb, with a value: what it takes, what it does
    "convert": {
        "--from": (
            "FORMAT",
            "verl, trl, openrlhf, llamafactory, openai, vllm, solutions, rein; auto (default) looks",
        ),
        "--to": ("KIND", "prompts, trajectories, preferences or sft; else what the rows are"),
        "--limit": ("N", "read the first N rows only"),
        "--max-bad-fraction": ("F", "stop where more rows than this cannot be used (default 0.01)"),
        "--temperature": ("T", "what rows that store no temperature were sampled at"),
        "--log-probs": (
            "MODE",
            "at a temperature other than 1: raw (taken at 1) or processed (taken at that one)",
        ),
    },
    "audit": {
        "--model": ("PATH", "model folder: what it says of the rows, and a verdict (model.path)"),
        "--against": ("FILE", "evaluation prompts (evaluate.files)"),
    },
    "cache": {
        "--older-than": ("DAYS", "prune what was not used for so many days"),
        "--max-size": ("SIZE", "prune what was used longest ago until the rest is no larger, such as 10GB"),
    },
    "deploy": {"--to": ("DIR", "the folder of versions v1, v2, ... and of `current`, which names one")},
    "ui": {
        "--host": ("HOST", "an address that others can reach (default 127.0.0.1: this machine alone)"),
        "--port": ("N", "the port (default 7346); 0: a free one"),
    },
}
