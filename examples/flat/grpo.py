"""Group relative policy optimization (GRPO), flat: the whole algorithm in one file, nothing imported from taut.

    python examples/flat/grpo.py --model DIR --data prompts.jsonl --out DIR --steps 20

The model answers each prompt several times; answers that did better than the others to the same prompt become more
likely, the others less. It is the plainest program that gives the numbers of ``taut grpo`` (README.md has the command).

1. Ask. Each epoch of the data is a fresh permutation, and each rollout takes the next ``samples_per_step`` prompts.
2. Sample. Each prompt gets a group of n answers, token by token from the model's own distribution, until a token that
   ends the turn. What is trained on are the ids as they were sampled; their text is for the reward alone.
3. Judge. Each answer gets a reward: here 1 if it ends in the right number, else 0. This is the function to change.
4. Compare. Inside a group, A = (reward - mean) / (standard deviation + 1e-4) is the advantage of an answer, and of each
   of its tokens. A group whose rewards are all alike teaches nothing.
5. Learn. With r = pi(token) / pi_old(token), where pi_old is the model as it was when it answered,

       loss = - sum over all tokens of min(r A, clip(r, 0.8, 1.28) A) / number of all tokens

   With ``epochs`` 1 a rollout is trained on by one step. Then pi is pi_old, r is 1, and the gradient that of -A log pi
   (REINFORCE); the loss is minus the mean of A whatever the model does: watch the reward. With more, the model moves
   away from pi_old, and the clip lets go of a token once r has gone far enough the way A points.
6. Update. Clip the gradient's norm; AdamW with a constant rate and no weight decay.

GRPO: arXiv 2402.03300; the mean over tokens and the higher upper bound: DAPO, 2503.14476. There is no reference model.
"""

import argparse
import hashlib
import json
import re
from itertools import count, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.utils import clip_grad_norm_
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

CLIP_LOW, CLIP_HIGH, LARGEST_GRAD_NORM = 0.2, 0.28, 1.0


def settings(arguments=None):
    parser = argparse.ArgumentParser(description="GRPO, flat.")
    option = parser.add_argument
    option("--model", required=True, help="model directory, tokenizer and template included")
    option("--data", required=True, help='JSONL of {"messages": [...], "answer": ...}')
    option("--out", required=True, help="where the tuned model is written")
    option("--steps", required=True, type=int, help="optimizer steps")
    option("--samples-per-step", type=int, default=32, help="prompts of a rollout")
    option("--n", type=int, default=8, help="answers to each prompt")
    option("--max-new-tokens", type=int, default=256, help="where an answer is cut")
    option("--epochs", type=int, default=1, help="steps that train on each rollout")
    option("--learning-rate", type=float, default=1e-5)
    option("--seed", type=int, default=0)
    option("--dtype", choices=("float32", "float64"), default="float32")
    option("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(arguments)


def reward(text, references):
    """1 where the last number of the text is the right one. taut takes it as it is: rewards=FILE.py:reward"""
    return float(re.findall(r"-?\d+(?:\.\d+)?", text)[-1:] == references)


class Prompt(NamedTuple):
    name: str  # the row's id, or FILE:line
    ids: list[int]
    references: list[str]


class Answer(NamedTuple):
    prompt: Prompt
    ids: list[int]  # as they were sampled, the one that ended it included
    reward: float
    advantage: float


def read(path, tokenizer):
    with Path(path).open(encoding="utf-8") as lines:
        rows = {f"{path}:{i}": json.loads(line) for i, line in enumerate(lines, 1) if line.strip()}
    for place, row in rows.items():
        assert row["messages"][-1]["role"] == "user", f"{place}: nothing is asked at the end"
        ids = tokenize(row["messages"], tokenizer, add_generation_prompt=True)
        yield Prompt(str(row.get("id", place)), ids, [str(row["answer"])])


def tokenize(messages, tokenizer, **options):
    """The template writes the special tokens: the tokenizer must not add them a second time."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    return tokenizer(text, add_special_tokens=False).input_ids


def stop_ids(model, tokenizer):
    """What ends an answer: the last special token of a turn, and those that tokenizer and model name."""
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    end_of_turn = [i for i in tokenize(turns, tokenizer) if i in special][-1]
    named = np.atleast_1d(model.generation_config.eos_token_id).tolist()  # one or several
    return special & {end_of_turn, tokenizer.eos_token_id, *named}


def seed_of(key):
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1


@torch.no_grad()
def sample(model, prompt, stops, args, key):
    """An answer's ids. Each is the first by which more than a random share of the probability is reached."""
    random = np.random.default_rng(seed_of(key))  # its own: what else is sampled changes nothing
    ids, unseen, cache = [], prompt.ids, None
    while len(ids) < args.max_new_tokens and not stops.intersection(ids[-1:]):
        new = torch.tensor([unseen], device=model.device)
        said = model(input_ids=new, past_key_values=cache, use_cache=True, logits_to_keep=1)
        reached = said.logits[0, -1].double().softmax(-1).cumsum(-1)
        ids.append(int((reached > random.random() * reached[-1]).nonzero()[0]))
        unseen, cache = ids[-1:], said.past_key_values
    return ids


def roll_out(model, tokenizer, prompts, rollout, args, judge):
    """A group of answers to each prompt, judged and compared."""
    stops, answers = stop_ids(model, tokenizer), []
    seed = seed_of(f"rollout/{args.seed}/{rollout}/0")
    for at, prompt in enumerate(prompts):
        again = prompts[:at].count(prompt)  # where a new epoch begins, a prompt may come twice
        name = f"{prompt.name} again {again}" if again else prompt.name
        group = [sample(model, prompt, stops, args, f"{seed}/{i}/{name}") for i in range(args.n)]
        texts = [tokenizer.decode([i for i in ids if i not in stops]) for ids in group]
        rewards = [judge(text, prompt.references) for text in texts]
        answers += map(Answer, [prompt] * args.n, group, rewards, advantages(rewards))
    return answers


def advantages(rewards):
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    return ((rewards - np.mean(rewards)) / (np.std(rewards, ddof=1) + 1e-4)).tolist()


def loss_sum(logp, old_logp, advantage):
    """The loss of an answer's tokens, summed."""
    ratio = (logp - old_logp).exp()  # its gradient is there where it is 1, too
    bounded = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    return -torch.minimum(ratio * advantage, bounded * advantage).sum()


def log_probs(model, answer):
    """log pi of each token of an answer, run alone after its prompt."""
    ids, size = torch.tensor([answer.prompt.ids + answer.ids], device=model.device), len(answer.ids)
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=size + 1).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, ids[0, -size:, None]).squeeze(1)


def train(model, tokenizer, prompts, args, judge=reward):
    """Run every step; the loss and the gradient's norm of each, and the answers it was trained on."""
    optimizer = torch.optim.AdamW(model.parameters(), args.learning_rate, weight_decay=0.0)
    epochs = (np.random.default_rng([args.seed, epoch]) for epoch in count())
    order = (number for random in epochs for number in random.permutation(len(prompts)))
    for step in range(args.steps):
        rollout, epoch = divmod(step, args.epochs)
        if epoch == 0:
            asked = [prompts[number] for number in islice(order, args.samples_per_step)]
            answers, old_logps = roll_out(model, tokenizer, asked, rollout, args, judge), {}
        num_tokens = sum(len(answer.ids) for answer in answers)  # the one denominator
        total = 0.0
        for at, answer in enumerate(answers):
            logp = log_probs(model, answer)
            old_logp = old_logps.setdefault(at, logp.detach())  # the first time pi is still pi_old
            loss = loss_sum(logp, old_logp, answer.advantage) / num_tokens
            loss.backward()
            total += loss.item()
        norm = clip_grad_norm_(model.parameters(), LARGEST_GRAD_NORM, error_if_nonfinite=True)
        optimizer.step()
        optimizer.zero_grad()
        yield total, norm.item(), answers


def load(path, dtype, device):
    """In eval mode: no dropout, so the model that is trained is the one that answers. eager has all softcaps."""
    weights = getattr(torch, dtype)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=weights, attn_implementation="eager")
    return model.to(device, weights).eval()  # .to: the rotary frequencies too


def main(arguments=None):
    args = settings(arguments)
    assert not Path(args.out).exists(), f"{args.out} is there already"
    tokenizer = AutoTokenizer.from_pretrained(args.model, clean_up_tokenization_spaces=False)
    model = load(args.model, args.dtype, args.device)
    steps = train(model, tokenizer, list(read(args.data, tokenizer)), args)
    for step, (loss, norm, answers) in enumerate(steps, start=1):
        mean = np.mean([answer.reward for answer in answers])
        print(f"step {step}/{args.steps}  reward {mean:.4f}  loss {loss:.6f}  grad norm {norm:.4f}")
    stored = AutoConfig.from_pretrained(args.model).dtype or torch.float32
    model.to(stored).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
